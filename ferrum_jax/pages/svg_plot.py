"""Plots as SVG, which a page draws in its own colours and at any width. Classes `a` and `b` are the two series."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

_WIDTH, _LEFT = 640, 78


class Frame:
    """The inside of a plot, in which places are shares of its width and height, from the lower left corner."""

    def __init__(self, *, height: int, right: int, top: int, bottom: int) -> None:
        self.height, self.top = height, top
        self.inner_width, self.inner_height = _WIDTH - _LEFT - right, height - top - bottom

    def x(self, share: float) -> float:
        return _LEFT + self.inner_width * share

    def y(self, share: float) -> float:
        return self.top + self.inner_height * (1 - share)

    def line(self, kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
        (x1, y1), (x2, y2) = start, end
        x1, x2, y1, y2 = self.x(x1), self.x(x2), self.y(y1), self.y(y2)
        return f'<line class="{kind}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'

    def lines(self, kind: str, points: Iterable[tuple[float, float]]) -> str:
        """Lines from each point to the next."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{kind}" points="{path}"/>'

    def vertical(self, x: float, kind: str = "grid") -> str:
        return self.line(kind, (x, 0.0), (x, 1.0))

    def horizontal(self, y: float, text: str = "") -> str:
        """A line of the grid, with a text at the axis."""
        at = f'<text x="{_LEFT - 10}" y="{self.y(y):.1f}" dy=".35em" text-anchor="end">{text}</text>' if text else ""
        return self.line("grid", (0.0, y), (1.0, y)) + at

    def below(self, x: float, text: str, *, rise: int = 8) -> str:
        """A text below the plot, `rise` above its lower edge; at both ends it stands within the plot."""
        anchor = {0.0: "start", 1.0: "end"}.get(x, "middle")
        return f'<text x="{self.x(x):.1f}" y="{self.height - rise}" text-anchor="{anchor}">{text}</text>'

    def figure(self, title: str, names: Mapping[str, str], label: str, parts: Iterable[str], after: str = "") -> str:
        """The figure. names: of the series, by class. label: what is drawn, for who does not see it. after: HTML."""
        legend = "".join(f'<span class="{kind}">{html.escape(name)}</span>' for kind, name in names.items())
        return (
            f"<figure><figcaption>{html.escape(title)}<span>{legend}</span></figcaption>"
            f'<svg viewBox="0 0 {_WIDTH} {self.height}" role="img" aria-label="{html.escape(label)}">{"".join(parts)}'
            f"</svg>{after}</figure>"
        )
