"""A roofline as SVG: what kernels reach of a chip's memory and matrix units, measured and as counting predicts.

Both axes are logarithmic: operations a byte, and operations a second. Classes `a` and `b` are measured and predicted.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 380, 78, 40, 18, 52
_INNER_WIDTH, _INNER_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


class Point(NamedTuple):
    """A case: operations a byte of K and V, and a second; None where it was not measured, or not predicted."""

    name: str
    per_byte: float
    measured: float | None
    predicted: float | None


class _Axes(NamedTuple):
    """Powers of ten at the ends of both axes."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, per_byte: float, per_s: float) -> tuple[float, float]:
        x, y = math.log10(per_byte), math.log10(per_s)
        return (
            _LEFT + _INNER_WIDTH * (x - self.x[0]) / (self.x[1] - self.x[0]),
            _TOP + _INNER_HEIGHT * (1 - (y - self.y[0]) / (self.y[1] - self.y[0])),
        )


def roofline(title: str, points: Sequence[Point], bytes_per_s: float, flops_per_s: float) -> str:
    """The figure. bytes_per_s, flops_per_s: of the roof."""
    axes = _axes(points, bytes_per_s, flops_per_s)
    parts = [*_grid(axes), *_roof(axes, bytes_per_s, flops_per_s)]
    labels = [axes.at(p.per_byte, rate) for p in points for rate in (p.measured, p.predicted) if rate]
    for number, point in enumerate(points, start=1):
        parts += _marks(axes, number, point, labels)
    names = (("a", "measured", [p.measured for p in points]), ("b", "predicted", [p.predicted for p in points]))
    legend = "".join(f'<span class="{kind}">{name}</span>' for kind, name, there in names if any(there))
    listed = "".join(f"<li>{html.escape(point.name)}</li>" for point in points)
    return (
        f"<figure><figcaption>{html.escape(title)}<span>{legend}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
        f'<ol class="cases">{listed}</ol></figure>'
    )


def _axes(points: Sequence[Point], bytes_per_s: float, flops_per_s: float) -> _Axes:
    """Whole powers of ten around the points and the ridge; both axes begin below the lowest point."""
    reached = [rate for p in points for rate in (p.measured, p.predicted) if rate]
    xs = [p.per_byte for p in points] + [flops_per_s / bytes_per_s]
    x = (math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 0.1))
    low = min([*reached, flops_per_s / 10])
    return _Axes(x=x, y=(math.floor(math.log10(low)), math.ceil(math.log10(flops_per_s) + 0.1)))


def _grid(axes: _Axes) -> Iterator[str]:
    bottom = _TOP + _INNER_HEIGHT
    for power in range(int(axes.x[0]), int(axes.x[1]) + 1):
        x, _ = axes.at(10.0**power, 10.0 ** axes.y[0])
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{10.0**power:,g}</text>'
    for power in range(int(axes.y[0]), int(axes.y[1]) + 1):
        _, y = axes.at(10.0 ** axes.x[0], 10.0**power)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 10}" y="{y:.1f}" dy=".35em" text-anchor="end">{10.0 ** (power - 12):g}</text>'
    yield f'<text x="{_LEFT + _INNER_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">operations a byte of KV</text>'
    yield f'<text x="{_LEFT + 8}" y="{_TOP + 4}" dy=".6em">Tflop/s</text>'


def _roof(axes: _Axes, bytes_per_s: float, flops_per_s: float) -> Iterator[str]:
    ridge, low = flops_per_s / bytes_per_s, 10.0 ** axes.x[0]
    start = max(low, 10.0 ** axes.y[0] / bytes_per_s)
    corners = (
        axes.at(start, start * bytes_per_s),
        axes.at(ridge, flops_per_s),
        axes.at(10.0 ** axes.x[1], flops_per_s),
    )
    yield f'<polyline class="roof" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'


def _marks(axes: _Axes, number: int, point: Point, labels: list[tuple[float, float]]) -> Iterator[str]:
    """A disc where it was measured, a ring where it is predicted, a line between them, and the number beside one.

    labels: where marks and numbers stand already; this one is added to them.
    """
    there = [
        (kind, *axes.at(point.per_byte, rate)) for kind, rate in (("a", point.measured), ("b", point.predicted)) if rate
    ]
    if len(there) == 2:
        (_, x1, y1), (_, x2, y2) = there
        yield f'<line class="between" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'
    for kind, x, y in there:
        name = html.escape(point.name)
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{name}</title></circle>'
    _, x, y = there[0]
    places = ((x + side * (14 + 20 * (step // 3)), y + 13 * (step % 3 - 1)) for step in range(30) for side in (1, -1))
    free = (at for at in places if all(abs(at[0] - a) > 13 or abs(at[1] - b) > 11 for a, b in labels))
    labels.append(next(free, (x + 14, y)))
    left, top = labels[-1]
    yield f'<text class="number" x="{left:.1f}" y="{top:.1f}" dy=".35em" text-anchor="middle">{number}</text>'
