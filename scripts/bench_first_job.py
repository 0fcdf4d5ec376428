"""Times a first job as whole programs: this engine with an empty store, started again, and `transformers` beside it.

    python -m scripts.bench_first_job --shape qwen3-0.6b [--reference-python PYTHON] [--rows 16 --tokens 128]

Each is a process of its own, from its start to its end: imports, weights, compiling, a warm-up of four tokens, then
`rows` prompts of `tokens` tokens that are completed by as many. The folder of random weights is made before, and so
lies in the page cache for all. Prints one JSON line.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from scripts.git_state import git_state
from scripts.shapes import SHAPES, write_random_checkpoint

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_OWN = """
import json, sys, time
began = time.perf_counter()
from ferrum_jax import LLM, EngineConfig, SamplingParams
folder, requests, store = sys.argv[1:]
prompts = json.load(open(requests))
llm = LLM(folder, EngineConfig(dtype="float32", compilation_cache_dir=store))
greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
llm.generate([prompts[0][0]], greedy, progress=False)
ready_s = time.perf_counter() - began
outputs = llm.generate(
    [ids for ids, _ in prompts], [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for _, n in prompts],
    progress=False,
)
stats = llm.stats()
print(json.dumps({"ready_s": round(ready_s, 2), "job_s": round(time.perf_counter() - began - ready_s, 2),
    "compiled_before": stats["compiles_before_ready"], "compiled_behind": stats["executables_compiled"],
    "tokens": sum(len(output.token_ids) for output in outputs)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument(
        "--weights-dir", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "ferrum_jax_shapes"
    )
    parser.add_argument("--reference-python", help="an interpreter with torch and transformers")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    folder = write_random_checkpoint(arguments.shape, arguments.weights_dir)
    for file in folder.iterdir():
        file.read_bytes()
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(1).integers(6, vocab_size, (arguments.rows, arguments.tokens))
    line: dict[str, Any] = {"shape": arguments.shape, "rows": arguments.rows, "tokens": arguments.tokens}
    with tempfile.TemporaryDirectory() as own:
        requests = pathlib.Path(own) / "requests.json"
        requests.write_text(json.dumps([[row, arguments.tokens] for row in ids.tolist()]))
        command = [sys.executable, "-c", _OWN, str(folder), str(requests), f"{own}/store"]
        line["empty_store"] = _timed(command)
        line["again"] = _timed(command)
        if arguments.reference_python:
            threads = str(len(os.sched_getaffinity(0)))
            reference = _ROOT / "scripts" / "bench_reference.py"
            line["reference"] = _timed(
                [arguments.reference_python, str(reference), str(folder), str(requests), threads]
            )
            whole_s = line["reference"]["whole_s"]
            line["over_reference"] = {
                name: round(line[name]["whole_s"] / whole_s, 2) for name in ("empty_store", "again")
            }
    print(json.dumps({**line, **git_state()}))


def _timed(command: list[str]) -> dict[str, Any]:
    """What a program said in its last line, with the seconds and CPU seconds from its start to its end."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_ROOT)
    whole_s, after = time.perf_counter() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return {"whole_s": round(whole_s, 1), "cpu_s": round(cpu_s, 1), **said}


if __name__ == "__main__":
    main()
