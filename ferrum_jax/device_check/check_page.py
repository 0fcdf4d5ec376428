"""The report of a check as one HTML page that needs nothing beside it, for a bug report."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.batch.report.style import STYLE
from ferrum_jax.device_check.estimates import estimates
from ferrum_jax.device_check.report import INTERPRETED, Report, scrubbed, tables
from ferrum_jax.device_check.roofline import Point, roofline
from pallas_kernels.target import Target

_OWN_STYLE = """
svg circle.a{fill:var(--a);stroke:none}svg circle.b{fill:none;stroke:var(--b);stroke-width:2}
svg .roof{stroke:var(--soft);stroke-width:2}svg .between{stroke:var(--rest)}
svg .number{font-size:12px;fill:var(--text)}
.cases{columns:2;margin:.8em 0 0;padding-left:2em;font-size:.86rem;color:var(--soft)}
.plots{grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
.text{text-align:left!important}.check td.result{white-space:normal;min-width:8ch}
.pairs td{text-align:left;white-space:normal;overflow-wrap:anywhere}.pairs td:first-child{color:var(--soft);width:30%}
.wrong li{margin:.3em 0;overflow-wrap:anywhere}
@media(max-width:600px){svg .number{font-size:18px}.cases{columns:1;font-size:.8rem}.check{font-size:.9em}}
"""
_TEXTS = ("", "op", "case", "by", "result", "run", "beside")  # columns that are no numbers
_PREDICTED_FOR = ("v6e", "v5e", "v7x")  # what is drawn where no chip is known: nothing was measured


def page(report: Report) -> str:
    """The page. All texts are escaped."""
    values = report.as_json()
    found = scrubbed(report.all_problems)
    plots, sections = _plots(values), [_section(table) for table in tables(values)]
    is_measured = (values["machine"]["devices"] or {}).get("generation") is not None
    findings = (plots, *sections) if is_measured else (*sections, plots)  # what nothing ran on comes last
    body = "".join((_head(values, report), _wrong(found, values["notes"]), *findings))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>ferrum-jax check</title><style>{STYLE}{_OWN_STYLE}</style><main>{body}</main></html>\n"
    )


def _head(values: Mapping[str, Any], report: Report) -> str:
    devices = values["machine"]["devices"]
    name = f"{devices['count']} x {devices['kind']}" if devices else "no device"
    return (
        f'<div class="soft">ferrum-jax check, {values["seconds"]:.0f} s</div><h1>{html.escape(name)}</h1>'
        f'<div><span class="state {"good" if report.is_right else "bad"}">{report.state}</span></div>'
    )


def _wrong(problems: Sequence[str], notes: Sequence[str]) -> str:
    lines = "".join(f'<li class="bad">{html.escape(text)}</li>' for text in problems)
    lines += "".join(f"<li>{html.escape(text)}</li>" for text in notes)
    return f'<h2>Wrong, or not done</h2><ul class="card wrong" style="padding-left:2em">{lines}</ul>' if lines else ""


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
    return f'<h2>Roofline</h2><div class="grid plots">{"".join(shown)}</div>' if shown else ""


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


def _section(table: tuple[str, tuple[str, ...], Sequence[Sequence[str]]]) -> str:
    title, head, rows = table
    if not any(head):
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f'<h2>{html.escape(title)}</h2><div class="card pairs"><table>{body}</table></div>'
    kinds = [f"text {name}" if name in _TEXTS else "" for name in head]
    top = "".join(_cell("th", kind, name) for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        f"<tr>{''.join(_cell('td', k, cell) for k, cell in zip(kinds, row, strict=True))}</tr>" for row in rows
    )
    table_ = f"<table><tr>{top}</tr>{body}</table>"
    if any(cell.endswith(" *") for row in rows for cell in row):
        table_ += f'<p class="soft">{html.escape(INTERPRETED)}</p>'
    return f'<h2>{html.escape(title)}</h2><div class="card check">{table_}</div>'


def _cell(tag: str, kind: str, text: str) -> str:
    bad = " bad" if "result" in kind and tag == "td" and text != "right" and not text.startswith("a tie") else ""
    return f'<{tag} class="{kind}{bad}">{html.escape(text)}</{tag}>'
