"""Offline throughput of the engine, one JSON line: speed, reuse, padding, compiles, memory, bytes against bandwidth.

    python scripts/bench_offline.py --shape qwen3-0.6b --workload decode
    python scripts/bench_offline.py --model DIR --workload shared_prefix
    ... --reference-python PYTHON    also times `transformers` generate on the same weights, in the same run

A shape has random weights, written once as a Hugging Face folder. Compile, first and steady times are apart:
the workload runs twice and the second run counts (prompts differ, so the first leaves it no hits).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax import LLM, EngineConfig, SamplingParams
from scripts.shapes import SHAPES, write_random_checkpoint

Request = tuple[list[int], int]  # token ids, tokens to generate
WORKLOADS = ("decode", "single", "shared_prefix", "ragged")


def make_workload(name: str, vocab_size: int, seed: int) -> list[Request]:
    """The requests of a workload; the same for the same seed."""
    rng = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return rng.integers(10, vocab_size, n).tolist()

    if name == "decode":
        return [(tokens(128), 128) for _ in range(16)]
    if name == "single":
        return [(tokens(128), 128)]
    if name == "shared_prefix":
        shared = tokens(1024)
        return [(shared + tokens(64), 32) for _ in range(32)]
    return [(tokens(int(rng.integers(16, 1025))), int(rng.integers(8, 129))) for _ in range(48)]


def open_llm(folder: pathlib.Path, config: EngineConfig) -> LLM:
    """The engine, with a line on stderr for each executable."""
    return LLM(
        str(folder), config, on_progress=lambda what, done, total: print(f"{what} {done}/{total}", file=sys.stderr)
    )


def run_workload(llm: LLM, requests: list[Request]) -> dict[str, float]:
    """Runs the requests to their end; seconds, tokens and what the engine counted meanwhile."""
    before = llm.stats()
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in requests]
    started = time.perf_counter()
    outputs = llm.generate([ids for ids, _ in requests], params, progress=False)
    wall_s = time.perf_counter() - started
    after = llm.stats()
    generated = sum(len(o.token_ids) for o in outputs)
    assert generated == sum(n for _, n in requests), "a request ended early"
    delta = {key: after[key] - before[key] for key in ("steps", "computed_tokens", "padded_tokens", "hit_tokens")}
    return {
        "wall_s": wall_s,
        "output_tok_s": generated / wall_s,
        "total_tok_s": (generated + sum(len(ids) for ids, _ in requests)) / wall_s,
        "padding_waste": 1 - delta["computed_tokens"] / delta["padded_tokens"],
        "preemptions": after["preemptions"] - before["preemptions"],
        **delta,
    }


def measured_bandwidth() -> float:
    """Bytes a second that this machine reads: the best of several sums over an array larger than any cache."""
    x = jnp.ones((64, 1 << 21), jnp.float32)  # 512 MiB
    add = jax.jit(lambda x: x.sum(axis=1))
    add(x).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        add(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return x.nbytes / min(times)


def bytes_per_decode_step(llm: LLM, requests: list[Request]) -> float:
    """Weights once, and the KV of all rows half-way through their generation."""
    live_tokens = sum(len(ids) + n / 2 for ids, n in requests[: llm.config.max_num_seqs])
    return llm.ledger.weights_bytes + live_tokens * llm.ledger.block_bytes / llm.ledger.block_size


def run_reference(python: str, folder: pathlib.Path, requests: list[Request]) -> dict[str, object]:
    """`transformers` generate on the same weights and prompts (all of equal length), in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        script = pathlib.Path(__file__).with_name("bench_reference.py")
        command = [python, str(script), str(folder), file.name, str(len(os.sched_getaffinity(0)))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def git_state() -> dict[str, object]:
    """Commit and whether files differ from it."""
    sha = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False).stdout != ""
    return {"git": sha, "dirty": dirty}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=pathlib.Path, help="checkpoint folder")
    what.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a real shape")
    parser.add_argument(
        "--weights-dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ferrum_jax_shapes"
    )
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--reference-python", help="an interpreter with torch and transformers")
    parser.add_argument("--profile", help="write a profiler trace of the measured run to this folder")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    folder = arguments.model or write_random_checkpoint(arguments.shape, arguments.weights_dir)
    config = EngineConfig(
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
        invariant=arguments.invariant,
        enable_prefix_caching=not arguments.no_prefix_caching,
    )
    llm = LLM(
        str(folder), config, on_progress=lambda what, done, total: print(f"{what} {done}/{total}", file=sys.stderr)
    )
    vocab_size = llm.spec.vocab_size
    first = run_workload(llm, make_workload(arguments.workload, vocab_size, seed=1))
    requests = make_workload(arguments.workload, vocab_size, seed=2)
    if arguments.profile:
        with jax.profiler.trace(arguments.profile):
            steady = run_workload(llm, requests)
    else:
        steady = run_workload(llm, requests)
    bandwidth, moved = measured_bandwidth(), bytes_per_decode_step(llm, requests)
    line: dict[str, object] = {
        "shape": arguments.shape or str(arguments.model.name),
        "workload": arguments.workload,
        **{key: round(value, 4) for key, value in steady.items()},
        "first_wall_s": round(first["wall_s"], 4),
        "startup_s": round(llm.startup_s, 2),
        "executables": llm.stats()["executables"],
        "compiles_after_ready": llm.stats()["compiles_after_ready"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_per_decode_step": round(moved),
        "measured_bandwidth_bytes_per_s": round(bandwidth),
        "decode_step_floor_s": round(moved / bandwidth, 4),
        "config": {k: v for k, v in dataclasses.asdict(config).items() if k != "compilation_cache_dir"},
        "device": f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "flax": importlib.metadata.version("flax"),
        **git_state(),
    }
    if arguments.workload == "shared_prefix":
        off = run_workload(open_llm(folder, dataclasses.replace(config, enable_prefix_caching=False)), requests)
        line["speedup_over_no_prefix_caching"] = round(off["wall_s"] / steady["wall_s"], 3)
    if arguments.reference_python:
        reference = run_reference(arguments.reference_python, folder, requests)
        line["reference"] = reference
        line["speedup"] = round(steady["output_tok_s"] / float(str(reference["output_tok_s"])), 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
