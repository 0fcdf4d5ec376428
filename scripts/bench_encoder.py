"""Measures an encoder on 1,000 sentences of uneven length, beside `transformers` sorted by length in the same run.

    python -m scripts.bench_encoder --reference-python PYTHON [--shape all-MiniLM-L6] [--texts 1000] [--runs 3]

Weights are random, in the shape of a published encoder (tests/published/encoders/). Lengths are drawn from a
log-normal distribution, 22 tokens in the middle. Each run times both sides in turn; vectors are compared first.
Prints one line of JSON: the median of the runs of either, the share of token slots that were padding, the load.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from typing import Any

import jax
import numpy as np

from ferrum_jax import LLM, EngineConfig
from scripts.git_state import git_state
from scripts.published import PUBLISHED_ENCODERS

_REFERENCE = pathlib.Path(__file__).with_name("bench_encoder_reference.py")
_TOLERANCE = 1e-4


def sentences(count: int, vocab_size: int) -> list[list[int]]:
    """Token ids, 4 to 256 of each."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(3.1, 0.55, count)), 4, 256).astype(int)
    return [rng.integers(5, vocab_size, int(length)).tolist() for length in lengths]


def run_reference(python: str, folder: pathlib.Path, texts: list[list[int]]) -> dict[str, Any]:
    path = folder / "texts.json"
    path.write_text(json.dumps(texts))
    command = [python, str(_REFERENCE), str(folder), str(path), str(os.cpu_count())]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(python: str, shape: str, num_texts: int, num_runs: int) -> dict[str, Any]:
    """The line."""
    config = PUBLISHED_ENCODERS[shape][0]
    texts = sentences(num_texts, config["vocab_size"])
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        reference = run_reference(python, folder, texts)
        theirs.append(reference.pop("wall_s"))
        llm = LLM(str(folder), EngineConfig(max_model_len=256))
        found = np.stack([output.embedding for output in llm.embed(texts, progress=False)])
        difference = float(np.abs(found - np.load(folder / "reference.npy")).max())
        assert difference < _TOLERANCE, f"vectors differ by {difference} from those of the reference"
        for number in range(num_runs):
            started = time.perf_counter()
            llm.embed(texts, progress=False)
            ours.append(time.perf_counter() - started)
            if number:
                theirs.append(run_reference(python, folder, texts)["wall_s"])
        stats = llm.stats()
    wall_s, reference_s = statistics.median(ours), statistics.median(theirs)
    return {
        "what": "embed",
        "shape": shape,
        "texts": num_texts,
        "tokens": sum(map(len, texts)),
        "wall_s": round(wall_s, 3),
        "runs_s": [round(each, 3) for each in ours],
        "reference_s": round(reference_s, 3),
        "reference_runs_s": [round(each, 3) for each in theirs],
        "speedup": round(reference_s / wall_s, 3),
        "padding": round(1 - stats["computed_tokens"] / stats["padded_tokens"], 4),
        "max_difference": difference,
        "executables": stats["executables"],
        "startup_s": round(stats["startup_s"], 1),
        "load": os.getloadavg()[0],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        **reference,
        **git_state(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference-python", required=True, help="an interpreter with torch and transformers")
    parser.add_argument("--shape", choices=sorted(PUBLISHED_ENCODERS), default="all-MiniLM-L6")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    print(json.dumps(measure(given.reference_python, given.shape, given.texts, given.runs)))


if __name__ == "__main__":
    main()
