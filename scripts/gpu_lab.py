"""The laboratory: where the time of a decode step goes on this GPU, as one page, within 9 minutes.

    scripts/gpu/lab                                    on a bare machine; packages come as scripts/gpu/check says
    scripts/gpu/lab --only llama-3-8b --output after   the parts whose name has this text

A part is a process: an engine over random weights in a model's real shape, with CUDA graphs as XLA makes them, none, or
in one of the modes of update that jax 0.12 has. Its cases run in turns: halves and one launch, tokens of a launch,
addresses that move. Parts run in order of worth, the last is `ferrum-jax check`; one that does not fit in what is left
is named, and what fails is a line with its error.

lab.md and lab.json each hold everything. Without a GPU small models run on the CPU, which shows that the laboratory
works. Ends with exit code 3 then, and 1 where nothing was measured.
"""

import argparse
import collections
import dataclasses
import datetime
import json
import os
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scripts.csv_tables import as_markdown
from scripts.git_state import git_state
from scripts.gpu_check import NO_GPU, Part, add_line, check_part, read_lines, run_part

_PLAIN, _UPDATE = "as XLA makes them", "--xla_gpu_command_buffer_update_mode="
GRAPHS = {_PLAIN: "", "none": "--xla_gpu_enable_command_buffer="}
GRAPHS |= {mode: _UPDATE + mode for mode in ("SKIP_TEMP", "SKIP_PROFILED")}  # jax 0.12's, beside ALWAYS_UPDATE
STEPS, TOKENS, ADDRESSES = ("halves", "launch"), (1, 4, 8), ("two", "many")
LOOPS = ({}, {"loop": "bare", "addresses": "one"})
FEW = [{"step": step, **loop} for loop in LOOPS for step in STEPS]
WHOLE = [
    *FEW,
    *({"step": "launch", "tokens": tokens, **loop} for loop in LOOPS for tokens in TOKENS[1:]),
    *({"step": step, "addresses": "many"} for step in STEPS),
    *({"step": "launch", "loop": "bare", "addresses": addresses} for addresses in ADDRESSES),
]
# Seconds of parts on an H200, guesses until one has run them: with graphs as XLA makes them, and with others.
PRICES = {"qwen3-0.6b": (60, 40), "llama-3-8b": (100, 60)}
_EXPERTS, _EXPERTS_S, _CHECK_S = "qwen3-30b-a3b", 90, 60
_CHECK_AROUND_S = 25  # of the check, beside what it is told
_HANGS = 3  # times its price, a part is cut
ON_GPU = {"rows": (64, 1, 256), "prompt": 512, "tokens": 80, "prefill": 4096}
ON_GPU |= {"config": {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 4608, "mesh": "tp=1"}}
ON_CPU = {"rows": (4, 1), "prompt": 12, "tokens": 40, "prefill": 32, "small": True}
ON_CPU |= {"config": {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_blocks": 256}}
READING = """\
"ms" is what a token of every row takes, the median of the turns; "device" the part of it in which the device computes,
by the profiler, under which XLA runs no CUDA graphs; "idle" what is left, none where the profiler slowed the device, as
on a CPU. A bare loop calls the executables of a step over and over and reads nothing: what it takes beyond the device
is XLA's, and what the engine takes beyond the bare loop is the host's. "one" set of results lies where it lay in the
step before, "two" take turns, as in the product, "many" move. Cases of one kind of graphs take turns; each kind is a
process of its own, one behind the other. "usage" is what XLA says of a flag that it does not know."""
_KEPT = {"left_out": "left_out", "failed": "problem", "starts": "opened_s", "turns": "token_s", "profiles": "busy_s"}
_CASE = ("rows", "step", "tokens", "loop", "addresses", "prefill")
_HEAD = ("what", "graphs", "tokens a launch", "loop", "addresses", "ms", "tok/s", "device, ms", "idle", "kernels")


def parts(output: pathlib.Path, left_s: Callable[[], float], *, is_gpu: bool) -> Iterator[tuple[Part, int]]:
    """All parts and their prices, in order of worth. left_s: the time that is left, for the check."""
    for graphs in GRAPHS:
        for model, prices in PRICES.items():
            yield _part(model, graphs, is_gpu=is_gpu), prices[graphs != _PLAIN]
    yield _part(_EXPERTS, _PLAIN, is_gpu=is_gpu), _EXPERTS_S
    check = check_part(output, seconds=max(5, int(min(left_s(), 2 * _CHECK_S) - _CHECK_AROUND_S)))
    yield dataclasses.replace(check, about={"part": "check"}), _CHECK_S


def _part(model: str, graphs: str, *, is_gpu: bool) -> Part:
    order: dict[str, Any] = {"model": model, "cases": WHOLE, "turns": 3, **(ON_GPU if is_gpu else ON_CPU)}
    order |= {"cases": FEW, "prefill": 0} if graphs != _PLAIN or model == _EXPERTS else {}
    weights = {"weights": "int4" if is_gpu else "int4-g16"}  # whose groups a small model's sizes have
    order["config"] = order["config"] | (weights if model == _EXPERTS else {})
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), GRAPHS[graphs])))
    name = f"{model}{' int4' if model == _EXPERTS else ''}"
    about = {"part": f"{name}, graphs {graphs}", "model": name, "graphs": graphs, "flags": flags}
    environment = {"LAB_ORDER": json.dumps(order | {"about": about})} | ({"XLA_FLAGS": flags} if flags else {})
    command = ("python", "-m", "scripts.lab_steps")
    return Part(name=about["part"], command=command, about=about, environment=environment)


def machine() -> dict[str, Any]:
    """This machine, with devices as jax opens them."""
    from ferrum_jax.cli.device_check.machine import describe_devices, look

    devices: dict[str, Any] = {}
    describe_devices(None, devices.update)
    here = look()
    about = {"driver": here.driver, "python": here.python, "packages": here.packages, "cpus": os.cpu_count()}
    return {"devices": devices, "misfits": here.problems, **about}


def medians(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each case: the median of its turns, and what the profile of its kind of step says."""
    values = ("token_s", "busy_s", "kernels")
    turns: collections.defaultdict[tuple[Any, ...], list[float]] = collections.defaultdict(list)
    profiles: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        if "token_s" in line:
            turns[tuple(item for item in line.items() if item[0] not in values)].append(line["token_s"])
        if "busy_s" in line:
            profiles[_kind(line)] = {name: line[name] for name in values[1:]}
    found = []
    for key, seconds in turns.items():
        case = dict(key) | {"token_s": statistics.median(seconds), "turns": len(seconds)}
        case |= profiles.get(_kind(case), {})
        found.append(case | ({"idle": 1 - case["busy_s"] / case["token_s"]} if "busy_s" in case else {}))
    return found


def _kind(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Cases of one kind run the same kernels."""
    return tuple(line.get(name) for name in ("part", "rows", "step", "tokens", "prefill"))


def write(output: pathlib.Path, about: dict[str, Any]) -> dict[str, Any]:
    """Writes lab.md and lab.json, and returns what they hold."""
    lines, check = read_lines(output / "lab.jsonl"), output / "check.json"
    here = next((line["machine"] for line in lines if "machine" in line), None)
    found = {"about": about, "machine": here, "cases": medians(lines)}
    found |= {name: [line for line in lines if key in line] for name, key in _KEPT.items()}
    found |= {"check": json.loads(check.read_text()) if check.is_file() else None}
    (output / "lab.json").write_text(json.dumps(found, indent=1) + "\n")
    (output / "lab.md").write_text(page(found))
    return found


def page(found: Mapping[str, Any]) -> str:
    """All of it as one text in markdown."""
    from ferrum_jax.cli.device_check.report import tables

    blocks = [f"# Laboratory, {found['about']['date']}", as_markdown([("what", ""), *_facts(found)])]
    if (found["machine"] or {}).get("devices", {}).get("platform") == "cpu":
        blocks.append("**No GPU: small models on the CPU. This shows that the laboratory works, and nothing else.**")
    for title, name in (("Left out", "left_out"), ("Failed", "failed")):
        reasons: dict[str, list[str]] = {}
        for line in found[name]:
            case = "".join(f", {key} {line[key]}" for key in _CASE if key in line)
            reasons.setdefault(line[_KEPT[name]], []).append(f"{line['part']}{case}")
        said = [f"- {'; '.join(dict.fromkeys(whose))}: {reason}" for reason, whose in reasons.items()]
        blocks += [f"## {title}", "\n".join(said)] if said else []
    blocks.append(READING if found["cases"] else "")
    for model in dict.fromkeys(case["model"] for case in found["cases"]):
        blocks.append(f"## {model}")
        cases = [case for case in found["cases"] if case["model"] == model]
        for rows in dict.fromkeys(case.get("rows") for case in cases):
            own = [_row(case) for case in cases if case.get("rows") == rows]
            blocks += [f"Rows: {rows}" if rows else "A prompt alone", as_markdown([_HEAD, *own])]
    if starts := found["starts"]:
        rows = [[each["part"], each["runs"], str(each["executables"]), f"{each['opened_s']:.1f}"] for each in starts]
        blocks += ["## Starts", as_markdown([("what", "attention, products", "executables", "s"), *rows])]
    if (check := found["check"]) is not None:
        blocks.append(
            f"## `ferrum-jax check`: {'right' if check['is_right'] else 'not right'}, {check['seconds']:.0f} s"
        )
        blocks.append("\n".join(f"- {line}" for line in (*check["problems"], *check["notes"])))
        for title, head, rows in [*tables(check)][1:]:  # the first is the machine
            blocks += [f"### {title}", as_markdown([["what", *head[1:]], *rows])]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    about, here = found["about"], found["machine"] or {}
    devices = here.get("devices", {})
    memory = f", {devices['memory_bytes'] / 2**30:.0f} GiB for jax" if devices.get("memory_bytes") else ""
    yield "command", f"`{about['command']}`"
    yield "commit", f"{about['git']}{', with changes' if about['dirty'] else ''}"
    yield "took", f"{about['seconds']} s until this was written"
    yield "flags of all", f"`{about['flags']}`" if about["flags"] else "none"
    yield "device", f"{devices.get('count', 0)} x {devices.get('kind')}{memory}, driver {here.get('driver') or 'none'}"
    yield "host", f"{here.get('cpus')} CPU cores, Python {here.get('python')}"
    yield "packages", ", ".join(" ".join(package) for package in here.get("packages", {}).items())


def _row(case: Mapping[str, Any]) -> list[str]:
    at_once, is_profiled = case.get("prefill") or case["rows"], "busy_s" in case
    idle = f"{case['idle']:.1%}" if is_profiled and case["idle"] >= 0 else "none" if is_profiled else ""
    return [
        case.get("step", f"{case.get('prefill', 0):,} tokens"),
        case["graphs"],
        *(str(case.get(name, "")) for name in ("tokens", "loop", "addresses")),
        f"{1e3 * case['token_s']:.3f}{'' if case['turns'] >= 3 else ' of fewer turns'}",
        f"{at_once / case['token_s']:,.0f}",
        f"{1e3 * case['busy_s']:.3f}" if is_profiled else "",
        idle,
        f"{case['kernels']:,.0f}" if is_profiled else "",
    ]


def run_all(arguments: argparse.Namespace, began_s: float) -> int:
    """Runs the parts and writes the page after each; the exit code. began_s: of time.time()."""
    output, lines, all_s = arguments.output, arguments.output / "lab.jsonl", 60 * arguments.minutes
    output.mkdir(parents=True, exist_ok=True)
    for name in ("lab.jsonl", "check.json"):
        (output / name).unlink(missing_ok=True)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    about = {"command": arguments.command, "date": date, "flags": os.environ.get("XLA_FLAGS", ""), **git_state()}

    def left_s() -> float:
        return all_s - (time.time() - began_s)

    def written() -> dict[str, Any]:
        return write(output, about | {"seconds": round(all_s - left_s())})

    looks = Part(name="machine", command=("python", "-m", "scripts.gpu_lab", "--machine"), about={"part": "machine"})
    run_part(looks, lines, max(1.0, left_s()))
    here = written()["machine"]
    is_gpu = here is not None and here["devices"]["platform"] == "gpu"
    for part, price_s in parts(output, left_s, is_gpu=is_gpu):
        if reason := why_not(part.name, arguments.only, here, price_s if is_gpu else 1, left_s()):
            add_line(lines, part.about | {"left_out": reason})
            continue
        print(f"\n{all_s - left_s():.0f} of {all_s:.0f} s", end="", file=sys.stderr)
        code = run_part(part, lines, min(left_s(), _HANGS * price_s) if is_gpu else left_s())
        if code and not part.prints and not (output / "check.json").is_file():
            add_line(lines, part.about | {"problem": f"ended with exit code {code} and left no report"})
        written()
    cases = written()["cases"]
    print(f"\n{output / 'lab.md'} and lab.json hold it all, {all_s - left_s():.0f} s", file=sys.stderr)
    return (0 if is_gpu else NO_GPU) if cases else 1


def why_not(name: str, only: str, here: dict[str, Any] | None, price_s: int, left_s: float) -> str | None:
    """Why a part is left out, or None. here: the machine, None where jax opened no device."""
    if only not in name:
        return f"not asked for, --only {only!r}"
    if here is None:
        return "jax opened no device"
    return f"needs some {price_s} s of {max(0, left_s):.0f} s that were left" if left_s < price_s else None


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("lab_output"), metavar="DIR")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it, installing too")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose name has it")
    parser.add_argument("--dry-run", action="store_true", help="print each part with its price and run none")
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    arguments.command = shlex.join(["scripts/gpu/lab", *(sys.argv[1:] if given is None else given)])
    if arguments.machine:
        print(json.dumps({"machine": machine()}))
    elif arguments.dry_run:
        print(
            "\n".join(
                f"{price_s:4} s  {part.name}" for part, price_s in parts(arguments.output, lambda: 0.0, is_gpu=True)
            )
        )
    else:
        sys.exit(run_all(arguments, float(os.environ.get("LAB_BEGAN") or time.time())))


if __name__ == "__main__":
    main()
