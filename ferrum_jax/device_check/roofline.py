"""A roofline as SVG: what kernels reach of a chip's memory and matrix units, measured and as counting predicts.

Both axes are logarithmic: operations a byte, and operations a second. Classes `a` and `b` are measured and predicted.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ferrum_jax.pages.svg_plot import Frame

_FRAME = Frame(height=380, right=40, top=18, bottom=52)


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
        """Its place in the frame."""
        x, y = math.log10(per_byte), math.log10(per_s)
        return (x - self.x[0]) / (self.x[1] - self.x[0]), (y - self.y[0]) / (self.y[1] - self.y[0])

    def drawn(self, per_byte: float, per_s: float) -> tuple[float, float]:
        x, y = self.at(per_byte, per_s)
        return _FRAME.x(x), _FRAME.y(y)


def roofline(title: str, points: Sequence[Point], bytes_per_s: float, flops_per_s: float) -> str:
    """The figure. bytes_per_s, flops_per_s: of the roof."""
    axes = _axes(points, bytes_per_s, flops_per_s)
    parts = [*_grid(axes), *_roof(axes, bytes_per_s, flops_per_s)]
    labels = [axes.drawn(p.per_byte, rate) for p in points for rate in (p.measured, p.predicted) if rate]
    for number, point in enumerate(points, start=1):
        parts += _marks(axes, number, point, labels)
    series = (("a", "measured", [p.measured for p in points]), ("b", "predicted", [p.predicted for p in points]))
    names = {kind: name for kind, name, there in series if any(there)}
    listed = "".join(f"<li>{html.escape(point.name)}</li>" for point in points)
    return _FRAME.figure(title, names, title, parts, f'<ol class="cases">{listed}</ol>')


def _axes(points: Sequence[Point], bytes_per_s: float, flops_per_s: float) -> _Axes:
    """Whole powers of ten around the points and the ridge; both axes begin below the lowest point."""
    reached = [rate for p in points for rate in (p.measured, p.predicted) if rate]
    xs = [p.per_byte for p in points] + [flops_per_s / bytes_per_s]
    x = (math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)) + 0.1))
    low = min([*reached, flops_per_s / 10])
    return _Axes(x=x, y=(math.floor(math.log10(low)), math.ceil(math.log10(flops_per_s) + 0.1)))


def _grid(axes: _Axes) -> Iterator[str]:
    (left, right), (low, high) = axes.x, axes.y
    for power in range(int(left), int(right) + 1):
        x = (power - left) / (right - left)
        yield _FRAME.vertical(x) + _FRAME.below(x, f"{10.0**power:,g}", rise=32)
    for power in range(int(low), int(high) + 1):
        yield _FRAME.horizontal((power - low) / (high - low), f"{10.0 ** (power - 12):g}")
    yield _FRAME.below(0.5, "operations a byte of KV", rise=6)
    yield f'<text x="{_FRAME.x(0) + 8}" y="{_FRAME.top + 4}" dy=".6em">Tflop/s</text>'


def _roof(axes: _Axes, bytes_per_s: float, flops_per_s: float) -> Iterator[str]:
    ridge, low = flops_per_s / bytes_per_s, 10.0 ** axes.x[0]
    start = max(low, 10.0 ** axes.y[0] / bytes_per_s)
    corners = (
        axes.at(start, start * bytes_per_s),
        axes.at(ridge, flops_per_s),
        axes.at(10.0 ** axes.x[1], flops_per_s),
    )
    yield _FRAME.lines("roof", corners)


def _marks(axes: _Axes, number: int, point: Point, labels: list[tuple[float, float]]) -> Iterator[str]:
    """A disc where it was measured, a ring where it is predicted, a line between them, and the number beside one.

    labels: where marks and numbers stand already; this one is added to them.
    """
    there = [
        (kind, axes.at(point.per_byte, rate)) for kind, rate in (("a", point.measured), ("b", point.predicted)) if rate
    ]
    if len(there) == 2:
        yield _FRAME.line("between", there[0][1], there[1][1])
    for kind, at in there:
        x, y, name = _FRAME.x(at[0]), _FRAME.y(at[1]), html.escape(point.name)
        yield f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{name}</title></circle>'
    x, y = _FRAME.x(there[0][1][0]), _FRAME.y(there[0][1][1])
    places = ((x + side * (14 + 20 * (step // 3)), y + 13 * (step % 3 - 1)) for step in range(30) for side in (1, -1))
    free = (at for at in places if all(abs(at[0] - a) > 13 or abs(at[1] - b) > 11 for a, b in labels))
    labels.append(next(free, (x + 14, y)))
    left, top = labels[-1]
    yield f'<text class="number" x="{left:.1f}" y="{top:.1f}" dy=".35em" text-anchor="middle">{number}</text>'
