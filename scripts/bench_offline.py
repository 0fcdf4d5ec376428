"""Offline throughput of the engine, one JSON line: speed, reuse, padding, compiles, memory, bytes against bandwidth.

    python -m scripts.bench_offline --shape qwen3-0.6b --workload decode
    python -m scripts.bench_offline --model DIR --workload shared_prefix
    ... --reference-python PYTHON    also times `transformers` generate on the same weights, in the same run

A shape has random weights, written once as a Hugging Face folder. shared_prefix also runs with the cache off.
`ferrum-jax bench` measures the same without a reference.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import jax

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.bench import WORKLOADS, Request, make_workload, measure, run_workload
from scripts.git_state import git_state
from scripts.shapes import SHAPES, write_random_checkpoint


def open_llm(folder: pathlib.Path, config: EngineConfig) -> LLM:
    """The engine, with a line on stderr for each executable."""
    return LLM(
        str(folder), config, on_progress=lambda what, done, total: print(f"{what} {done}/{total}", file=sys.stderr)
    )


def run_reference(python: str, folder: pathlib.Path, requests: list[Request]) -> dict[str, Any]:
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
    arguments = parser.parse_args()
    if arguments.reference_python and arguments.workload == "ragged":
        parser.error("--reference-python needs prompts of one length, and those of ragged are not")
    return arguments


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
    llm = open_llm(folder, config)
    with jax.profiler.trace(arguments.profile) if arguments.profile else contextlib.nullcontext():
        line = {"shape": folder.name, **measure(llm, arguments.workload), **git_state()}
    requests = make_workload(arguments.workload, llm.spec.vocab_size, seed=2)
    if arguments.workload == "shared_prefix":
        off = run_workload(open_llm(folder, dataclasses.replace(config, enable_prefix_caching=False)), requests)
        line["speedup_over_no_prefix_caching"] = round(off["wall_s"] / line["wall_s"], 3)
    if arguments.reference_python:
        line["reference"] = run_reference(arguments.reference_python, folder, requests)
        line["speedup"] = round(line["output_tok_s"] / line["reference"]["output_tok_s"], 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
