"""The report of a check as one HTML page that needs nothing beside it, for a bug report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.device_check.estimates import estimates
from ferrum_jax.device_check.report import INTERPRETED, STOOD, Report, scrubbed, tables
from ferrum_jax.device_check.roofline import Point, roofline
from ferrum_jax.pages.html_page import document, escaped, grid, head, table
from pallas_kernels.target import Target

_TEXTS = (  # columns that are no numbers
    *("", "op", "case", "by", "result", "run", "beside"),
    *("model", "workload", STOOD),
)
_PREDICTED_FOR = ("v6e", "v5e", "v7x")  # what is drawn where no chip is known: nothing was measured


def page(report: Report) -> str:
    """The page. All texts are escaped."""
    values = report.as_json()
    found = scrubbed(report.all_problems)
    plots, sections = _plots(values), [_section(*each) for each in tables(values)]
    is_measured = (values["machine"]["devices"] or {}).get("generation") is not None
    findings = (plots, *sections) if is_measured else (*sections, plots)  # what nothing ran on comes last
    return document("ferrum-jax check", _head(values, report), _wrong(found, values["notes"]), *findings)


def _head(values: Mapping[str, Any], report: Report) -> str:
    devices = values["machine"]["devices"]
    name = f"{devices['count']} x {devices['kind']}" if devices else "no device"
    kind = "good" if report.is_right else "bad"
    return head(f"ferrum-jax check, {values['seconds']:.0f} s", name, kind, report.state)


def _wrong(problems: Sequence[str], notes: Sequence[str]) -> str:
    lines = "".join(f'<li class="bad">{escaped(text)}</li>' for text in problems)
    lines += "".join(f"<li>{escaped(text)}</li>" for text in notes)
    return f'<h2>Wrong, or not done</h2><ul class="card wrong">{lines}</ul>' if lines else ""


def _plots(values: Mapping[str, Any]) -> str:
    """A roofline of the chip; where none is known, of what counting predicts for the generations."""
    devices = values["machine"]["devices"] or {}
    generation, platform = devices.get("generation"), devices.get("platform")
    measured = {
        line["case"]: line
        for line in values["kernels"]
        if line.get("num_bytes") and line.get("flops") and line["implementation"] != "xla"
    }
    if generation is not None:
        points = _points(measured, {p["case"]: p for p in estimates(generation)})
        shown = (
            [_figure(f"Kernels on {generation}", points, Target.named(f"{platform}:{generation}"))] if points else []
        )
    else:
        shown = [
            _figure(f"Predicted for {name}: nothing ran on it", points, Target.named(f"tpu:{name}"))
            for name in _PREDICTED_FOR
            if (points := _points({}, {p["case"]: p for p in estimates(name)}))
        ]
    return f"<h2>Roofline</h2>{grid('plots', shown)}" if shown else ""


def _points(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[Point]:
    """By case, from few operations a byte to many."""
    found = []
    for name in dict.fromkeys((*measured, *predicted)):
        line = measured.get(name) or predicted[name]
        seconds, guessed = measured.get(name, {}).get("median_s"), predicted.get(name, {}).get("predicted_s")
        found.append(
            Point(
                name=name,
                per_byte=line["flops"] / line["num_bytes"],
                measured=line["flops"] / seconds if seconds else None,
                predicted=line["flops"] / guessed if guessed else None,
            )
        )
    return sorted(found, key=lambda point: (point.per_byte, point.name))


def _figure(title: str, points: Sequence[Point], target: Target) -> str:
    return roofline(title, points, target.bandwidth_bytes_per_s, target.flops_per_s)


def _section(title: str, columns: tuple[str, ...], rows: Sequence[Sequence[str]]) -> str:
    if not any(columns):
        return f"<h2>{escaped(title)}</h2>{table((), rows, 'pairs')}"
    note = INTERPRETED if any(cell.endswith(" *") for row in rows for cell in row) else ""
    return f"<h2>{escaped(title)}</h2>{table(columns, rows, 'check', note=note, look=_look)}"


def _look(column: str, cell: str | None) -> str:
    """The class of a cell: texts are not numbers, and what is wrong is red."""
    is_bad = cell is not None and (
        (column == "result" and cell != "right" and not cell.startswith("a tie"))
        or (column == STOOD and ("the ruler is wrong" in cell or cell.startswith("wrong: ")))
    )
    return (f"text {column}" if column in _TEXTS else "") + (" bad" if is_bad else "")
