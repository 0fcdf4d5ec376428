"""The report as one HTML page that needs nothing beside it: a table of runs, and plots over time as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ferrum_jax.ints import ceil_div

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 560, 200, 64, 28, 24
_COLOURS = ("#1f6f8b", "#d1495b")
_MOST_POINTS = 120
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.6em;overflow-wrap:anywhere}h2{margin-top:1.6em}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.2em .9em;text-align:right;white-space:nowrap;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}
figure{display:inline-block;margin:.6em .6em .6em 0;max-width:100%}
figcaption{font-weight:600}svg{background:#fafafa;max-width:100%;height:auto}svg text{font-size:11px;fill:#555}
@media(max-width:600px){svg text{font-size:16px}}"""

Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (seconds, value)


def page(report: Mapping[str, Any]) -> str:
    """The page of a report that `record.report` made."""
    title = html.escape(f"Batch job {report['output']}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1>{_summary(report)}<h2>Over time</h2>{_figures(report['runs'])}"
        f"<h2>Runs</h2>{_runs(report['runs'])}</html>\n"
    )


def _summary(report: Mapping[str, Any]) -> str:
    rows, prompt = report["rows"], report["prompt_tokens"]
    cells = {
        "rows ok": f"{rows['ok']:,} of {rows['all']:,}",
        "rows failed": f"{rows['failed']:,}",
        "tokens in": f"{prompt:,}",
        "of them reused": f"{report['cached_tokens']:,} ({report['cached_tokens'] / max(prompt, 1):.1%})",
        "tokens out": f"{report['output_tokens']:,}",
        "time of all runs": f"{report['wall_s']:,.1f} s",
        "output speed": f"{report['output_tokens'] / max(report['wall_s'], 1e-9):,.1f} tok/s",
    }
    return _table((), cells.items())


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    head = ("worker", "ended", "rows", "tokens in", "reused", "tokens out", "seconds")
    names = ("worker", "ended", "rows", "prompt_tokens", "cached_tokens", "output_tokens", "wall_s")
    return _table(head, ([f"{r[n]:,}" if not isinstance(r[n], str) else r[n] for n in names] for r in runs))


def _table(head: Sequence[str], rows: Any) -> str:
    top = f"<tr>{''.join(f'<th>{html.escape(h)}</th>' for h in head)}</tr>" if head else ""
    return f"<table>{top}{''.join(f'<tr>{_cells(row)}</tr>' for row in rows)}</table>"


def _cells(row: Sequence[str]) -> str:
    return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)


def _figures(runs: Sequence[Mapping[str, Any]]) -> str:
    points = _points(runs)
    if len(points) < 2:
        return "<p>Too short for plots.</p>"

    def rate(name: str, per: str) -> list[tuple[float, float]]:
        """Between points at which `per` has risen: rows are counted when they are durable, so not at each."""
        found, last = [], points[0]
        for point in points:
            if point[per] > last[per]:
                found.append((point["at_s"], max(point[name] - last[name], 0.0) / (point[per] - last[per])))
            if point[per] != last[per]:
                last = point
        return found

    def level(name: str) -> list[tuple[float, float]]:
        return [(point["at_s"], 100 * point[name]) for point in points]

    hits = [(at, 100 * share) for at, share in rate("cached_tokens", "prompt_tokens")]
    return "".join(
        (
            _plot("Throughput, tokens/s", {"in": rate("prompt_tokens", "at_s"), "out": rate("output_tokens", "at_s")}),
            _plot("Prompt tokens from the prefix cache, %", {"hit rate": hits}, top=100.0),
            _plot(
                "Pool and padding, %",
                {"pool use": level("pool_use"), "padding waste": level("padding_waste")},
                top=100.0,
            ),
            _plot("Tokens a row", {"in": rate("prompt_tokens", "rows"), "out": rate("output_tokens", "rows")}),
        )
    )


def _points(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Samples of all runs one after the other, with cumulative counts; at most so many as a plot shows."""
    found, bases = [], dict.fromkeys(("wall_s", "rows", "prompt_tokens", "cached_tokens", "output_tokens"), 0.0)
    for run in runs:
        for values in run["samples"]["values"]:
            sample = dict(zip(run["samples"]["fields"], values, strict=True))
            sample.update({name: sample[name] + base for name, base in bases.items()})
            found.append({**sample, "at_s": sample["wall_s"]})
        bases = {name: base + run[name] for name, base in bases.items()}
    return found[:: max(1, ceil_div(len(found), _MOST_POINTS))]


def _plot(title: str, series: Series, top: float | None = None) -> str:
    """Lines over seconds up to the last. top: of the scale; without it a round number above the highest value."""
    drawn = [point for points in series.values() for point in points]
    last = max((x for x, _ in drawn), default=0.0) or 1.0
    top = top or _round_above(max((y for _, y in drawn), default=0.0))
    inner_w, inner_h = _WIDTH - _LEFT - 24, _HEIGHT - _TOP - _BOTTOM
    parts = []
    for tick in (0.0, 0.5, 1.0):
        y, x = _TOP + inner_h * (1 - tick), _LEFT + inner_w * tick
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(top * tick)}</text>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{last * tick:,.3g} s</text>')
    for index, ((name, points), colour) in enumerate(zip(series.items(), _COLOURS, strict=False)):
        path = " ".join(f"{_LEFT + inner_w * x / last:.1f},{_TOP + inner_h * (1 - y / top):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        x = _LEFT + 8 + 110 * index
        parts.append(f'<text x="{x}" y="16" style="fill:{colour};font-weight:600">{html.escape(name)}</text>')
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"


def _round_above(value: float) -> float:
    """The least of 1, 2, 4, 6, 8 and 10 times a power of ten that is not less: half of it is short to write, too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 6, 8, 10) if factor * power >= value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
