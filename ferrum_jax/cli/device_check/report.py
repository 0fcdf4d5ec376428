"""The report of a check: JSON values without a path, a machine's name or a prompt, and tables that a person reads."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ferrum_jax.cli.device_check.estimates import beside_estimates, said_of_ceilings
from ferrum_jax.io.pages.html_page import document, escaped, table

_ROOT = Path(__file__).parents[3]
# from the root, from home or of a store, but no page of the web; a slash within words, as in tokens/s, begins none
_PATH = re.compile(r"""(?<![\w.:/])(?!https?:)(?:~|[a-z][a-z0-9+]*:/)?/[^\s'"<>,;()\[\]]*[^\s'"<>,;()\[\].:]""")
_MIN_NAME = 5  # characters: a shorter name of a machine is a word like others


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """machine: what is here. rates, kernels, tiles, engine, benches: a mapping for each line; tiles are of --tune,
    benches of `ferrum-jax bench` and its like, added once the check is over.

    problems: sentences, beside those of lines. notes: sentences on what was not done. words: what parts and cases that
    failed said, with their tracebacks, which have paths and so are in no page.
    """

    machine: dict[str, Any]
    rates: Sequence[dict[str, Any]]
    kernels: Sequence[dict[str, Any]]
    engine: Sequence[dict[str, Any]]
    problems: Sequence[str]
    notes: Sequence[str]
    seconds: float
    tiles: Sequence[dict[str, Any]] = ()
    benches: Sequence[dict[str, Any]] = ()
    words: Sequence[str] = ()

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Report:
        """The report that `as_json` wrote."""
        return cls(**{name: value for name, value in values.items() if name not in ("format", "is_right")})

    @property
    def all_problems(self) -> list[str]:
        """A sentence for everything that is wrong."""
        found = list(self.problems)
        found += [f"{line['what']}: {line['problem']}" for line in self.rates if line["problem"]]
        found += [
            f"{line['op']}, {line['case']}, {line['implementation']}: {line['problem']}"
            for line in self.kernels
            if line["problem"]
        ]
        found += [f"engine, {line['run']}: {line['problem']}" for line in self.engine if line["problem"]]
        return found

    @property
    def is_right(self) -> bool:
        return not self.all_problems

    @property
    def state(self) -> str:
        """The result in three words."""
        count = len(self.all_problems)
        return "all is right" if not count else "1 thing is wrong" if count == 1 else f"{count} things are wrong"

    def as_json(self) -> dict[str, Any]:
        """JSON values, in which nothing tells whose machine it was."""
        fields = dataclasses.asdict(self)
        del fields["words"]
        return scrubbed({"format": 1, "is_right": self.is_right, **fields})

    def show(self, console: Console) -> None:
        """Prints the tables."""
        report = self.as_json()
        for title, head, rows in tables(report, wide=False):
            head = tuple("op, case" if name == "case" and title == "Kernels" else name for name in head)
            table = Table(
                title=title,
                title_justify="left",
                box=SIMPLE_HEAD,
                pad_edge=False,
                padding=(0, 1, 0, 0),
                show_header=any(head),
            )
            for number, name in enumerate(head):
                is_text = number == 0 or name in ("", "by", "result", "beside", STOOD)
                table.add_column(
                    name if is_text else name.replace("tolerance", "tol.").replace(" ", "\n"),  # all fit in 80
                    justify="left" if is_text else "right",
                    no_wrap=name not in ("result", STOOD),
                    overflow="fold",
                )
            for row in rows:
                table.add_row(*row)
            console.print(table)
        if any(line.get("is_interpreted") for line in self.kernels):
            console.print(INTERPRETED, highlight=False)
        for problem in scrubbed(self.all_problems):
            console.print(f"wrong: {problem}", highlight=False)
        for note in scrubbed(list(self.notes)):
            console.print(note, highlight=False)
        console.print(f"{self.state}, {self.seconds:.0f} s", highlight=False)


STOOD = "how it stood"
INTERPRETED = "* interpreted on the CPU, as no chip runs it: right or wrong, and no time"
Rows = list[tuple[str, ...]]


def tables(report: dict[str, Any], *, wide: bool = True) -> Iterable[tuple[str, tuple[str, ...], Rows]]:
    """(title, names of columns, rows) of each table of a report as JSON, without columns that are empty.

    wide: all columns, and the benches, for a page.
    """
    yield "What is here", ("", ""), _facts(report["machine"])
    cells = [_kernel(line, wide=wide) for line in report["kernels"]]
    shown = [name for name in (cells[0] if cells else ()) if wide or name not in _ONLY_WIDE]
    kernels = [tuple(line[name] for name in shown) for line in cells]
    kernels = kernels if wide else list(_below_ops(cells, kernels))
    for title, head, rows in (
        ("What it reaches", ("", "measured", "data sheet", "share", "result"), list(map(_reached, report["rates"]))),
        ("Kernels", tuple(shown), kernels),
        ("Ceilings", ("case", STOOD), said_of_ceilings(report["kernels"])),
        ("Estimates", ("case", "measured", "estimate", "times", STOOD), beside_estimates(report["kernels"])),
        ("Tiles of decode", ("tiles", "case", "time", "result"), list(map(_tried, report.get("tiles", ())))),
        ("Engine", ("run", "beside", "equal", "tok/s", "result"), list(map(_run, report["engine"]))),
        ("Benches", _BENCH, benched(report.get("benches", ())) if wide else []),
    ):
        filled = [number for number in range(len(head)) if any(row[number] for row in rows)]
        if filled:
            yield title, tuple(head[n] for n in filled), [tuple(row[n] for n in filled) for row in rows]


def _below_ops(cells: Sequence[dict[str, str]], rows: Rows) -> Iterator[tuple[str, ...]]:
    """The rows, those of an op below a row with its name: 80 columns have no room for one more."""
    for before, line, row in zip(("", *(line["op"] for line in cells)), cells, rows, strict=False):
        if line["op"] != before:
            yield (line["op"], *("" for _ in row[1:]))
        yield (f" {row[0]}", *row[1:])


def _reached(rate: dict[str, Any]) -> tuple[str, ...]:
    measured, sheet = (_rate(rate[name], rate["unit"]) for name in ("value", "sheet"))
    return rate["what"], measured, sheet, _share(rate["share"]), rate["problem"] or "right"


def _facts(machine: dict[str, Any]) -> Rows:
    devices = machine["devices"] or {}
    rows = [("devices", f"{devices['count']} x {devices['kind']}" if devices else "none could be opened")]
    if machine["chips"]:
        rows.append(("chips on the bus", ", ".join(machine["chips"])))
    if devices.get("memory_bytes"):
        used, most = devices["memory_used_bytes"] or 0, devices["memory_bytes"]
        rows.append(("memory", f"{(most - used) / 2**30:.1f} of {most / 2**30:.1f} GiB free"))
    rows += [(name, version) for name, version in machine["packages"].items()]
    rows.append(("Python", machine["python"]))
    if machine["driver"]:
        rows.append(("driver", machine["driver"]))
    if devices:
        rows.append(("compiler", devices["compiler"]))
    return rows


_ONLY_WIDE = ("op", "tolerance", "p90", "first call", "predicted", "ceiling", "of ceiling")


def _kernel(line: dict[str, Any], *, wide: bool) -> dict[str, str]:
    """The cells of a kernel's line by column. of tolerance: the error's share of it. wide: with what is wrong."""
    error, speed = line.get("error"), line.get("speed")
    return {
        "op": line["op"],
        "case": line["case"],
        "by": f"{line['implementation']} *" if line.get("is_interpreted") else line["implementation"],
        "result": (line["problem"] if wide else "wrong") if line["problem"] else "right",
        "of tolerance": _share(error),
        "tolerance": "" if error is None else f"{line['tolerance']:g}",
        "time": _time(line.get("median_s")),
        "p90": _time(line.get("p90_s")),
        "first call": _time(line.get("compile_s")),
        "of copy": _share(line.get("of_copy")),
        "of matmul": _share(line.get("of_matmul")),
        "times xla": "" if speed is None else f"{speed:.2f}",
        "predicted": _time(line.get("predicted_s")),
        "ceiling": f"{_time(line['ceiling_s'])} {line['ceiling_unit']}" if "ceiling_s" in line else "",
        "of ceiling": _share(line.get("of_ceiling")),
    }


def _run(line: dict[str, Any]) -> tuple[str, ...]:
    speed, difference = line.get("tokens_per_s"), line.get("difference")
    note = line["problem"] or "right"
    if line["problem"] is None and difference is not None:
        note = f"a tie at prompt {difference['prompt']}, token {difference['token']}: {difference['gap']:.2g} apart"
    equal = f"{line['equal']} of {line['of']}" if line["beside"] else ""
    return (line["run"], line["beside"] or "", equal, "" if speed is None else f"{speed:,.0f}", note)


_BENCH = (
    *("model", "workload", "by", "output tok/s", "all tok/s", "step"),
    *("of bandwidth", "start", "times vllm", "result"),
)


def benched(lines: Sequence[dict[str, Any]]) -> Rows:
    """The rows of benches; those of this engine say how many times as fast they are as vLLM with the same work."""
    theirs = {_bench_of(line): line["output_tok_s"] for line in lines if "vllm" in line and "output_tok_s" in line}
    rows = []
    for line in lines:
        ours, other = line.get("output_tok_s"), None if "vllm" in line else theirs.get(_bench_of(line))
        rows.append(
            (
                *_bench_of(line),
                f"vllm {line['vllm']}".strip() if "vllm" in line else "ferrum_jax",
                "" if ours is None else f"{ours:,.0f}",
                f"{line['total_tok_s']:,.0f}" if "total_tok_s" in line else "",
                _time(line.get("decode_step_s")),
                _share(line.get("of_bandwidth_roofline")),
                _time(line.get("startup_s")),
                "" if other is None or ours is None else f"{ours / other:.2f}",
                line.get("problem") or "right",
            )
        )
    return rows


def _bench_of(line: dict[str, Any]) -> tuple[str, str]:
    return line.get("shape") or line.get("model") or "", line.get("workload", "")


def _tried(line: dict[str, Any]) -> tuple[str, ...]:
    note = "right" if line["problem"] is None else line["problem"]
    return line["tiles"], line["shape"], _time(line["median_s"]), f"{note}, the fastest" if line["is_best"] else note


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return (
        f"{seconds * 1e6:,.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:,.2f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
    )


def _rate(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def scrubbed(value: Any) -> Any:
    """The values, with this machine's paths and name removed from texts."""
    if isinstance(value, dict):
        return {scrubbed(key): scrubbed(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(each) for each in value]
    if not isinstance(value, str):
        return value
    for path in sorted((str(_ROOT), str(Path.cwd()), str(Path.home())), key=len, reverse=True):
        value = value.replace(path, "...") if len(path) > 1 else value
    value = _PATH.sub("...", value)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "...", value) if len(host) >= _MIN_NAME else value


def page(report: Report) -> str:
    """The report as one HTML page that needs nothing beside it, for a bug report. All texts are escaped."""
    values = report.as_json()
    devices = values["machine"]["devices"]
    name = f"{devices['count']} x {devices['kind']}" if devices else "no device"
    wrong = [(text,) for text in (*scrubbed(report.all_problems), *values["notes"])]
    note = INTERPRETED if any(line.get("is_interpreted") for line in report.kernels) else ""
    return document(
        "ferrum-jax check",
        f"<h1>{escaped(name)}</h1><p>ferrum-jax check, {report.seconds:.0f} s: {escaped(report.state)}</p>",
        f"<h2>Wrong, or not done</h2>{table((), wrong)}" if wrong else "",
        *(f"<h2>{escaped(title)}</h2>{table(head if any(head) else (), rows)}" for title, head, rows in tables(values)),
        f"<p>{note}</p>",
    )
