"""The first minutes on a GPU: checks it, benches engines on it, and leaves one page of both.

    scripts/gpu/check                                             where nothing is installed
    scripts/gpu/check --with-vllm --vllm-python PYTHON            also times vLLM on the same prompts

`ferrum-jax check` runs every kernel beside an oracle, times it beside XLA, a copy and a large product, and holds it
against its ceiling. Then decode, ragged and shared_prefix run with the demo model and with random weights in the shapes
of Qwen3-0.6B and, where the memory holds it, Llama-3-8B. All is over in 5 minutes beside the installation: each part
has an end, and one that is cut says so. vLLM and --model have their time beside that, and --full has no limits.

check.json, check.html and bench.jsonl hold the results. Ends with the exit code of the check.
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import os
import pathlib
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

from scripts.bench_vllm import MISSING

WORKLOADS = ("decode", "ragged", "shared_prefix")
_SHAPES = ("qwen3-0.6b", "llama-3-8b")
_LARGE, _LARGE_BYTES = "llama-3-8b", 30e9  # which is what jax gives of a GPU of 40 GB
_ENDS_S = {"check": 155.0, "demo": 178.0, "qwen3-0.6b": 215.0, "llama-3-8b": 290.0}  # since the start of the first
_MORE_S = 150.0  # for each of the others
_CHECK_S = 125  # that the check is told, which finishes the case that it has begun
_PARTS = "paged_attention,quantized_matmul,grouped_matmul,engine"  # what has kernels on a GPU
_FEW = ("--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--max-model-len", "2048")  # few executables
_GRACE_S = 10.0  # from being asked to end to being ended
_CUT = 124
NO_GPU = 3  # exit code
_ERROR = re.compile(
    rb"[\w.]*(Error|Exception|Exit)\b|usage: |F\d{4} "
)  # XLA's usage begins with the flag that it refuses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A command. about: fields that name its model. prints: whether its standard output is JSON lines to keep.

    environment: beside that of this process.
    """

    name: str
    command: tuple[str, ...]
    about: dict[str, str] = dataclasses.field(default_factory=dict)
    prints: bool = True
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def check_part(output: pathlib.Path, *, full: bool = False, seconds: int = _CHECK_S) -> Part:
    """`ferrum-jax check`, of this interpreter."""
    most = ("--full",) if full else ("--seconds", str(seconds), "--parts", _PARTS)
    command = ("python", "-m", "ferrum_jax", "check", "--output", str(output), *most)
    return Part(name="check", command=command, prints=False)


def bench_part(name: str, *what: str) -> Part:
    """All workloads in one engine. what: flags that name the model."""
    command = ("python", "-m", "scripts.bench_offline", *what, "--workload", *WORKLOADS, *_FEW)
    return Part(name=name, command=command, about={"shape": name})


def vllm_part(shape: str, python: str, output: pathlib.Path) -> Part:
    """vLLM on the same requests; `write_requests` writes what it reads."""
    folder = output / "vllm" / shape
    command = (python, "scripts/bench_vllm.py", str(folder), str(folder / "requests.json"))
    return Part(name=f"{shape} by vllm", command=command, about={"shape": shape, "vllm": ""})


def parts(arguments: argparse.Namespace) -> list[Part]:
    """All of them, in their order."""
    found = [
        check_part(arguments.output, full=arguments.full),
        bench_part("demo", "--model", "checkpoints/demo"),
        *(bench_part(shape, "--shape", shape, "--on-device") for shape in _SHAPES),
    ]
    if arguments.model is not None:
        name = f"--model {pathlib.PurePath(arguments.model).name}"  # no shape's, whose end and memory are others
        found.append(bench_part(name, "--model", arguments.model))
    if arguments.with_vllm:
        found += [vllm_part(shape, arguments.vllm_python, arguments.output) for shape in _SHAPES]
    return found


def why_not(part: Part, devices: dict[str, Any] | None) -> str | None:
    """Why a part is left out. devices: what the check found, None where it did not come so far."""
    if part.about and devices is not None and devices["platform"] == "cpu":
        return "left out: the check found no GPU"
    if part.about.get("shape") != _LARGE:
        return None
    memory = (devices or {}).get("memory_bytes")
    if memory is None:
        return "left out: the check did not say how much memory there is, and it needs a GPU of 40 GB"
    return None if memory >= _LARGE_BYTES else "left out: it needs a GPU of 40 GB"


def run_part(part: Part, bench: pathlib.Path, limit_s: float | None) -> int:
    """Runs the command in a process group of its own; its exit code, _CUT where it was cut.

    A bench's lines are added to the file as they come, and where it did not come to its end a line that says why.
    """
    print(f"\n{part.name}: {shlex.join(part.command)}", file=sys.stderr, flush=True)
    command = [sys.executable if word == "python" else word for word in part.command[:1]] + list(part.command[1:])
    with bench.open("a") if part.prints else contextlib.nullcontext() as file:
        env, pipe = os.environ | part.environment, subprocess.PIPE if part.prints else None  # others show bars there
        process = subprocess.Popen(command, stdout=file, stderr=pipe, env=env, start_new_session=True)
        said = collections.deque[bytes](maxlen=1)
        reader = threading.Thread(target=_pass_on, args=(process.stderr or io.BytesIO(), said), daemon=True)
        reader.start()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = _CUT
        finally:
            end(process)
            reader.join(_GRACE_S)
    last = b"".join(said).decode(errors="replace").strip()[:300] or "it named no error"
    problem = f"cut after {limit_s:.0f} s" if code == _CUT else f"failed: it ended with exit code {code}: {last}"
    if code:
        print(f"{part.name}: {problem}", file=sys.stderr, flush=True)
    if code and part.prints:
        add_line(bench, part.about | {"problem": problem})
    return code


def _pass_on(errors: IO[bytes], said: collections.deque[bytes]) -> None:
    """Shows what a process writes to its standard error, and keeps the last line that names an error."""
    with errors:
        for line in errors:
            sys.stderr.write(line.decode(errors="replace"))
            sys.stderr.flush()
            said.extend([line] if _ERROR.match(line) else [])


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process with what it started; it is interrupted first, so that it ends what left its group itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def add_line(bench: pathlib.Path, line: dict[str, Any]) -> None:
    """Adds a line of its own, also behind half of one, which a process that was ended may leave."""
    before = bench.read_text() if bench.is_file() else ""
    bench.write_text(before + ("" if before.endswith("\n") or not before else "\n") + json.dumps(line) + "\n")


def read_lines(bench: pathlib.Path) -> list[dict[str, Any]]:
    """The whole lines so far."""
    texts = bench.read_text().splitlines() if bench.is_file() else []
    return [json.loads(text) for text in texts if text.endswith("}")]


def write_requests(shape: str, output: pathlib.Path) -> None:
    """What vLLM reads: the shape's config.json, and each workload's prompts of both runs of `ferrum-jax bench`."""
    from ferrum_jax.cli.benchmarks.workloads import make_workload
    from scripts.shapes import SHAPES

    folder, config = output / "vllm" / shape, SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    requests = {name: [make_workload(name, config["vocab_size"], seed) for seed in (1, 2)] for name in WORKLOADS}
    (folder / "requests.json").write_text(json.dumps(requests))


def write_page(output: pathlib.Path, check_code: int) -> dict[str, Any] | None:
    """Writes check.json and check.html with the benches so far, and returns what the check says of the devices."""
    from ferrum_jax.cli.device_check.report import Report, page

    file, bench = output / "check.json", output / "bench.jsonl"
    if file.is_file():
        report = Report.of_json(json.loads(file.read_text()))
    else:
        how = "was cut" if check_code == _CUT else f"ended with exit code {check_code}"
        machine = {"chips": [], "packages": {}, "driver": None, "python": platform.python_version(), "devices": None}
        nothing: dict[str, Any] = {"machine": machine, "rates": [], "kernels": [], "engine": [], "notes": []}
        report = Report(**nothing, problems=[f"the check {how} and left no report"], seconds=0.0)
    report = dataclasses.replace(report, benches=read_lines(bench))
    (output / "check.html").write_text(page(report))
    if file.is_file():
        file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    return report.machine["devices"]


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="bench this model too")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("check_output"), metavar="DIR")
    parser.add_argument("--full", action="store_true", help="all cases of the check; no limit of time")
    parser.add_argument("--with-vllm", action="store_true", help="also time vLLM on the prompts of both shapes")
    parser.add_argument("--vllm-python", default="python3", metavar="PYTHON", help="with --with-vllm: has vllm")
    parser.add_argument("--dry-run", action="store_true", help="print each command and run none")
    return parser.parse_args(given)


def require_vllm(python: str) -> None:
    """Raises SystemExit where the interpreter has no vllm, before minutes of work."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        is_missing = subprocess.run([python, "-c", look], check=False).returncode != 0
    except OSError as error:
        raise SystemExit(f"--vllm-python is {python!r}, which does not run ({error.strerror})") from None
    if is_missing:
        raise SystemExit(MISSING.format(python))


def run_all(arguments: argparse.Namespace) -> int:
    """Runs the parts and writes the page after each; the exit code of the check, NO_GPU where it found none."""
    output, bench = arguments.output, arguments.output / "bench.jsonl"
    output.mkdir(parents=True, exist_ok=True)
    for name in ("check.json", "check.html", "check.txt", "bench.jsonl"):
        (output / name).unlink(missing_ok=True)
    started, check_code, devices = time.monotonic(), 0, None
    for part in parts(arguments):
        if reason := why_not(part, devices):
            add_line(bench, part.about | {"problem": reason})
            continue
        if "vllm" in part.about:
            write_requests(part.about["shape"], output)
        ends_s = _ENDS_S.get(part.name)
        limit_s = _MORE_S if ends_s is None else max(1.0, ends_s - (time.monotonic() - started))
        code = run_part(part, bench, None if arguments.full else limit_s)
        check_code = code if part.name == "check" else check_code
        devices = write_page(output, check_code)
    write_page(output, check_code)
    print(f"\n{output / 'check.html'} holds it all, {time.monotonic() - started:.0f} s", file=sys.stderr)
    if devices is not None and devices["platform"] == "cpu":
        print("the check found no GPU and tried the CPU alone; see that nvidia-smi shows one", file=sys.stderr)
        return check_code or NO_GPU
    return check_code


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    if arguments.dry_run:
        print("\n".join(shlex.join(part.command) for part in parts(arguments)))
        return
    if arguments.with_vllm:
        require_vllm(arguments.vllm_python)
    sys.exit(run_all(arguments))


if __name__ == "__main__":
    main()
