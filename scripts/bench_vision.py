"""Measures a prompt with a picture through Qwen3-VL-2B's shape on the CPU, beside `transformers` in the same run.

    python -m scripts.bench_vision --reference-python PYTHON [--size 640x480] [--layers 4] [--tower-layers 24]

Weights are random and float32; layers of a kind are alike, so fewer of them show the same ratio. Runs alternate: the
reference's tower, the reference's prompt up to its first token, the same prompt here with a picture that was not there
before, and once more with that picture but no cached blocks. What the second takes less is the tower's time here. The
first token's log-probability is compared first. Prints one line of JSON: medians by the clock and of the CPU, which
other work disturbs less, how often the encoder was called, the load. Processing of the picture on the host is in none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import IO, Any

import jax
import numpy as np

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.prompt import MediaSpan
from scripts.git_state import git_state
from scripts.published import config_of as published_config

QWEN3_VL_2B = published_config("Qwen3-VL-2B")

_REFERENCE = pathlib.Path(__file__).with_name("bench_vision_reference.py")
_TOLERANCE = 1e-3
_MERGE = QWEN3_VL_2B["vision_config"]["spatial_merge_size"]
_PATCH = QWEN3_VL_2B["vision_config"]["patch_size"]
_FRAMES = QWEN3_VL_2B["vision_config"]["temporal_patch_size"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPicture:
    """A picture as the processor makes it. patches: [rows * columns, values] float32."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    num_tokens: int
    digest: bytes
    kind: str = "image"
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """Token ids with one picture among them."""

    ids: list[int]
    picture: BenchPicture

    def options(self, digest: bytes) -> RequestOptions:
        """A request's, whose picture is another one for the engine with each digest."""
        picture = dataclasses.replace(self.picture, digest=digest)
        start = self.ids.index(QWEN3_VL_2B["image_token_id"])
        span = MediaSpan(kind="image", digest=digest, start=start, length=picture.num_tokens)
        return RequestOptions(media=[span], images=[picture])


def drawn(width: int, height: int, num_text: int) -> BenchPrompt:
    """A prompt of a picture of this size in pixels, text before and after it."""
    rng = np.random.default_rng(0)
    rows, columns = (_MERGE * max(round(side / _PATCH / _MERGE), 1) for side in (height, width))
    count = rows * columns // _MERGE**2
    patches = rng.uniform(-1, 1, (rows * columns, 3 * _FRAMES * _PATCH**2)).astype(np.float32)
    before, after = rng.integers(5, 100_000, (2, num_text // 2)).tolist()
    marks = QWEN3_VL_2B["vision_start_token_id"], QWEN3_VL_2B["vision_end_token_id"]
    ids = [*before, marks[0], *[QWEN3_VL_2B["image_token_id"]] * count, marks[1], *after]
    picture = BenchPicture(patches=patches, grid=(1, rows, columns), num_tokens=count, digest=b"")
    return BenchPrompt(ids=ids, picture=picture)


class Reference:
    """The other process, which waits on its input while this one computes."""

    def __init__(self, python: str, folder: pathlib.Path) -> None:
        command = [python, str(_REFERENCE), str(folder), str(os.cpu_count())]
        waits = {"OMP_WAIT_POLICY": "PASSIVE"}  # its threads take no time from this process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | waits
        )
        self.versions = self._answer()

    def run(self) -> dict[str, float]:
        """Seconds of the tower and of the prompt, by the clock and of the CPU."""
        stdin = self._pipe(self._process.stdin)
        stdin.write("\n")
        stdin.flush()
        return self._answer()

    def end(self) -> None:
        self._pipe(self._process.stdin).close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise SystemExit(f"the reference ended with status {self._process.wait()}; what it said is above")
        return json.loads(line)

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None, "both were asked for"
        return pipe


class Here:
    """The engine. Prefix caching is off, so that a prompt is computed whole each time."""

    def __init__(self, folder: pathlib.Path, prompt: BenchPrompt) -> None:
        config = EngineConfig(
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            max_image_tokens=1024,
            max_image_patches=4096,
            enable_prefix_caching=False,
            compilation_cache_dir=None,
            check="off",
        )
        self.llm, self._prompt, self.first = LLM(str(folder), config), prompt, dict[int, float]()

    def run(self, digest: bytes) -> dict[str, float]:
        """Seconds up to the first token, by the clock and of the CPU, and calls of the encoder."""
        engine = self.llm.engine
        before = engine.counts()["encoder_calls"]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
        deltas = []
        started, cpu = time.perf_counter(), time.process_time()
        engine.add(self._prompt.ids, params, self._prompt.options(digest))
        while engine.has_unfinished:
            deltas.extend(engine.step())
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        logprobs = deltas[0].logprobs
        assert logprobs is not None, "they were asked for"
        self.first = {token: logprob for token, logprob, _ in logprobs[0]}
        calls = engine.counts()["encoder_calls"] - before
        return {"prompt_s": wall_s, "prompt_cpu_s": cpu_s, "encoder_calls": calls}

    def difference(self, folder: pathlib.Path) -> float:
        """The largest, of the last run's log-probabilities of the first token from those of the reference."""
        wanted = np.load(folder / "reference.npz")["logprobs"]
        return max(abs(float(wanted[token]) - found) for token, found in self.first.items())


def config_of(num_layers: int, num_tower_layers: int) -> dict[str, Any]:
    """Qwen3-VL-2B with the first layers of both parts; deepstack takes as many, as evenly."""
    text, vision = QWEN3_VL_2B["text_config"], QWEN3_VL_2B["vision_config"]
    deep = [layer * num_tower_layers // vision["depth"] for layer in vision["deepstack_visual_indexes"]]
    text = text | {"num_hidden_layers": num_layers, "dtype": "float32"}
    vision = vision | {"depth": num_tower_layers, "deepstack_visual_indexes": deep}
    return QWEN3_VL_2B | {"text_config": text, "vision_config": vision, "dtype": "float32"}


def measure(
    python: str, size: tuple[int, int], layers: tuple[int, int], num_text: int, num_runs: int
) -> dict[str, Any]:
    """The line. layers: of the text model and of the tower."""
    prompt = drawn(*size, num_text)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config_of(*layers)))
        grids = np.array([prompt.picture.grid], np.int32)
        np.savez(
            folder / "prompt.npz", prompt=np.array(prompt.ids, np.int32), grids=grids, patches=prompt.picture.patches
        )
        reference = Reference(python, folder)
        here = Here(folder, prompt)
        reference.run()  # memory is taken
        here.run(b"first")
        difference = here.difference(folder)
        assert difference < _TOLERANCE, f"log-probabilities differ by {difference} from those of the reference"
        runs = [_alternated(reference, here, number) for number in range(num_runs)]
        reference.end()
        stats = here.llm.stats()
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {
        "what": "vision",
        "shape": "Qwen3-VL-2B",
        "layers": layers,
        "picture": "x".join(map(str, size)),
        "patches": len(prompt.picture.patches),
        "prompt_tokens": len(prompt.ids),
        **{key: round(value, 3) for key, value in medians.items()},
        **{
            f"speed_of_{what}": round(medians[f"reference_{what}"] / medians[what], 3)
            for what in ("prompt_s", "prompt_cpu_s", "tower_s", "tower_cpu_s")
        },
        "runs": [{key: round(value, 3) for key, value in run.items()} for run in runs],
        "max_difference": difference,
        "compiles_after_ready": stats["compiles_after_ready"],
        "load": os.getloadavg()[0],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **reference.versions,
        **git_state(),
    }


def _alternated(reference: Reference, here: Here, number: int) -> dict[str, float]:
    theirs, first, repeated = reference.run(), here.run(b"%d" % number), here.run(b"%d" % number)
    return {
        **{f"reference_{key}": value for key, value in theirs.items()},
        **first,
        **{f"repeated_{key}": value for key, value in repeated.items()},
        "tower_s": first["prompt_s"] - repeated["prompt_s"],
        "tower_cpu_s": first["prompt_cpu_s"] - repeated["prompt_cpu_s"],
    }


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", required=True, help="an interpreter with torch and transformers")
    parser.add_argument(
        "--size",
        type=_size,
        default=(640, 480),
        help="of the picture in pixels, WIDTHxHEIGHT; 4,096 patches of 16 at most, 440 tokens",
    )
    parser.add_argument("--layers", type=int, default=4, help="of the text model, 3 to 28")
    parser.add_argument("--tower-layers", type=int, default=24, help="of the tower, 6 to 24")
    parser.add_argument("--text", type=int, default=64, help="tokens of text")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    layers = given.layers, given.tower_layers
    print(json.dumps(measure(given.reference_python, given.size, layers, given.text, given.runs)))


if __name__ == "__main__":
    main()
