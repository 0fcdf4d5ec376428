"""Offline throughput of the engine, a JSON line each: speed, reuse, padding, compiles, memory, bytes against bandwidth.

    python -m scripts.bench_offline --shape qwen3-0.6b --workload decode
    python -m scripts.bench_offline --model DIR --workload shared_prefix
    ... --reference-python PYTHON    also times `transformers` on the same prompts, in the same run

On an accelerator, 64 streams of 512 in, 512 out (also qwen3-0.6b and qwen3-30b-a3b):

    python -m scripts.bench_offline --shape llama-3-8b --on-device --workload streams --max-num-seqs 64 \\
        --implementation mosaic_gpu --reference-python PYTHON --continuous-batching

A shape has random weights, in a Hugging Face folder that is written once, or with --on-device made on the device in
its published dtype and vocabulary. Several workloads run one after the other in one engine; shared_prefix alone also
runs with the cache off. The reference runs first, for an engine keeps the device's memory to itself. `ferrum-jax bench`
measures the same without a reference.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ferrum_jax import LLM, EngineConfig
from ferrum_jax.cli.benchmarks.workloads import WORKLOADS, Request, make_workload, measure, run_workload
from ferrum_jax.cli.flags import add_engine_flags, engine_config
from ferrum_jax.models.families import registry
from scripts.git_state import git_state
from scripts.shapes import SHAPES, random_source, write_random_checkpoint

_REFERENCE = pathlib.Path(__file__).with_name("bench_reference.py")
_DEFAULTS = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 2048, "ready": "all"}


def opener(arguments: argparse.Namespace, folder: pathlib.Path) -> Callable[[EngineConfig], LLM]:
    """What opens engines over the model, with a line on stderr for each executable."""

    def tell(what: str, done: int, total: int) -> None:
        print(f"{what} {done}/{total}", file=sys.stderr)

    if arguments.on_device:
        return lambda config: LLM.from_source(random_source(SHAPES[arguments.shape]), config, on_progress=tell)
    return lambda config: LLM(str(folder), config, on_progress=tell)


def run_reference(
    python: str, folder: pathlib.Path, requests: list[Request], *, continuous_batching: bool
) -> dict[str, Any]:
    """`transformers` on the folder's model and these prompts, in a process of its own; see bench_reference.py."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(requests, file)
        file.flush()
        command = [python, str(_REFERENCE), str(folder), file.name, str(len(os.sched_getaffinity(0)))]
        command += ["--continuous-batching"] if continuous_batching else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=pathlib.Path, help="checkpoint folder")
    what.add_argument("--shape", choices=sorted(SHAPES), help="random weights of a real shape")
    parser.add_argument(
        "--weights-dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ferrum_jax_shapes"
    )
    parser.add_argument("--on-device", action="store_true", help="make a shape's weights on the device, in no folder")
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", required=True)
    parser.add_argument("--reference-python", help="an interpreter with torch and transformers")
    parser.add_argument("--continuous-batching", action="store_true", help="of the reference, instead of its generate")
    parser.add_argument("--profile", help="write a profile of the measured run to this folder")
    add_engine_flags(parser)
    arguments = parser.parse_args(given)
    if arguments.on_device and arguments.shape is None:
        parser.error("--on-device makes the weights of a shape; give --shape")
    if len(arguments.workload) > 1 and (arguments.reference_python or arguments.profile):
        parser.error("--reference-python and --profile are for one workload")
    if arguments.reference_python and arguments.workload == ["ragged"]:
        parser.error("--reference-python needs prompts of one length, and those of ragged are not")
    return arguments


def describe(arguments: argparse.Namespace, parent: pathlib.Path) -> pathlib.Path:
    """The folder of the model; with --on-device one in `parent` that has no weights, for the reference."""
    if not arguments.on_device:
        return arguments.model or write_random_checkpoint(arguments.shape, arguments.weights_dir)
    folder = parent / arguments.shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
    return folder


def run(arguments: argparse.Namespace, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The lines."""
    if len(arguments.workload) == 1:
        yield run_alone(arguments, folder, arguments.workload[0])
        return
    llm = opener(arguments, folder)(engine_config(arguments, _DEFAULTS))
    for workload in arguments.workload:
        yield {"shape": folder.name, **measure(llm, workload), **git_state()}


def run_alone(arguments: argparse.Namespace, folder: pathlib.Path, workload: str) -> dict[str, Any]:
    """The line of a workload and what it is compared with. The reference has the prompts of the run that counts."""
    config = engine_config(arguments, _DEFAULTS)
    vocab_size = registry.spec_of(json.loads((folder / "config.json").read_text())).vocab_size
    requests = make_workload(workload, vocab_size, seed=2)
    reference = None
    if arguments.reference_python:
        reference = run_reference(
            arguments.reference_python, folder, requests, continuous_batching=arguments.continuous_batching
        )
    open_llm = opener(arguments, folder)
    llm = open_llm(config)
    assert llm.spec.vocab_size == vocab_size
    with jax.profiler.trace(arguments.profile) if arguments.profile else contextlib.nullcontext():
        line = {"shape": folder.name, **measure(llm, workload), **git_state()}
    if workload == "shared_prefix":
        del llm
        off = run_workload(open_llm(dataclasses.replace(config, enable_prefix_caching=False)), requests)
        line["speedup_over_no_prefix_caching"] = round(off["wall_s"] / line["wall_s"], 3)
    if reference is not None:
        line["reference"] = reference
        line["speedup"] = round(line["output_tok_s"] / reference["output_tok_s"], 3)
    return line


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    with tempfile.TemporaryDirectory() as parent:
        for line in run(arguments, describe(arguments, pathlib.Path(parent))):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
