"""Plots of a job's runs over time as SVG, which a page draws in its own colours and at any width.

Runs stand one after the other, with a dashed line between them. Classes `a` and `b` are the two series of a plot.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.ints import ceil_div

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 78, 30, 12, 34
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_MOST_POINTS = 120
_COUNTS = ("rows", "prompt_tokens", "cached_tokens", "output_tokens")

Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (seconds, value)


def figures(runs: Sequence[Mapping[str, Any]]) -> str:
    """Four plots of the runs; a sentence where their samples are too few for lines."""
    points, ends = _points(runs)
    if len(points) < 3:
        return "<p>The runs were too short for plots.</p>"

    def rate(name: str, per: str, scale: float = 1.0) -> list[tuple[float, float]]:
        """By how much `name` rises per unit of `per`, between points at which `per` has risen."""
        found, last = [], points[0]
        for point in points:
            if point[per] > last[per]:
                found.append((point["wall_s"], scale * max(point[name] - last[name], 0.0) / (point[per] - last[per])))
                last = point
        return found

    def level(name: str) -> list[tuple[float, float]]:
        return [(point["wall_s"], 100 * point[name]) for point in points]

    hits = rate("cached_tokens", "prompt_tokens", 100.0)
    shares = {"pool in use": level("pool_use"), "padding": level("padding_waste")}
    speeds = {"in": rate("prompt_tokens", "wall_s"), "out": rate("output_tokens", "wall_s")}
    lengths = {"in": rate("prompt_tokens", "rows"), "out": rate("output_tokens", "rows")}
    return "".join(
        (
            _plot("Throughput, tokens a second", speeds, ends),
            _plot("Prompt tokens from the prefix cache, %", {"reused": hits}, ends, top=100.0),
            _plot("KV pool and padding, %", shares, ends, top=100.0),
            _plot("Tokens a row", lengths, ends),
        )
    )


def _points(runs: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, float]], list[float]]:
    """Samples of all runs, thinned for a plot, with counts added up over runs; and the times at which runs ended."""
    found: list[dict[str, float]] = []
    bases, ends = dict.fromkeys(("wall_s", *_COUNTS), 0.0), []
    for run in runs:
        for values in run["samples"]["values"]:
            sample = dict(zip(run["samples"]["fields"], values, strict=True))
            found.append(sample | {name: sample[name] + base for name, base in bases.items()})
        bases = {name: base + run[name] for name, base in bases.items()}
        ends.append(bases["wall_s"])
    return found[:: max(1, ceil_div(len(found), _MOST_POINTS))], ends


def _plot(title: str, series: Series, ends: Sequence[float], top: float | None = None) -> str:
    """Lines over seconds. top: the end of the y axis; without it, a round number above the highest value."""
    drawn = list(itertools.chain.from_iterable(series.values()))
    last = max((x for x, _ in drawn), default=0.0) or 1.0
    top = top or _round_above(max((y for _, y in drawn), default=0.0))
    parts = [*_scales(last, top), *_marks(ends, last)]
    for kind, points in zip("ab", series.values(), strict=False):
        path = " ".join(f"{_x(x / last):.1f},{_y(y / top):.1f}" for x, y in points)
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    names = zip("ab", series, strict=False)
    legend = "".join(f'<span class="{kind}">{html.escape(name)}</span>' for kind, name in names)
    label = html.escape(f"{' and '.join(series)} over time")
    return (
        f"<figure><figcaption>{html.escape(title)}<span>{legend}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg></figure>'
    )


def _scales(last: float, top: float) -> Iterator[str]:
    for tick in (0.0, 0.5, 1.0):
        y, x = _y(tick), _x(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 10}" y="{y:.1f}" dy=".35em" text-anchor="end">{_number(top * tick)}</text>'
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{_clock(last * tick)}</text>'


def _marks(ends: Sequence[float], last: float) -> Iterator[str]:
    """Where a run ended and another began."""
    for end in ends[:-1]:
        if end < last:
            x = f"{_x(end / last):.1f}"
            yield f'<line class="end" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_TOP + _INNER_HEIGHT}"/>'


def _x(share: float) -> float:
    return _LEFT + _INNER_WIDTH * share


def _y(share: float) -> float:
    return _TOP + _INNER_HEIGHT * (1 - share)


def _round_above(value: float) -> float:
    """The least number of 1, 2, 4, 6, 8, 10 times a power of ten that is not below `value`: its half is short too."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 4, 6, 8, 10) if factor * power >= value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """Seconds, minutes or hours, whichever a person reads at once."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
