"""Parts of a page that needs nothing beside it. All that a part is given is escaped, but for what is called html."""

import html
from collections.abc import Iterable, Mapping, Sequence

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:0 auto;padding:20px}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin-top:2rem}
.card,figure{overflow-x:auto;margin:1rem 0}figcaption{font-weight:600}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.3em 1em .3em 0;text-align:left;vertical-align:top;border-top:1px solid #8886;overflow-wrap:anywhere}
svg{display:block;max-width:640px;width:100%}svg text{font-size:14px;fill:currentColor}
polyline{fill:none;stroke-width:2}.a{color:#0b8ec9;stroke:#0b8ec9}.b{color:#d9541e;stroke:#d9541e}
figcaption span{font-weight:400;margin-left:1em}rect{fill:none;stroke:#8886}
"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 240, 70, 12, 212  # of a plot, with the edges of its inside


def escaped(value: object) -> str:
    return html.escape(str(value))


def document(title: str, *parts_html: str) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style><main>{''.join(parts_html)}</main></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """head: names of columns; () for none."""
    top = [_row("th", head)] if head else []
    return f'<div class="card"><table>{"".join([*top, *(_row("td", row) for row in rows)])}</table></div>'


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>"


def plot(title: str, series: Mapping[str, Sequence[tuple[float, float]]], until: str, top: float | None = None) -> str:
    """At most two lines over time. until: the time of the last point, in words. top: of the scale, from 0 on."""
    points = [point for line in series.values() for point in line]
    last = max((x for x, _ in points), default=0.0) or 1.0
    top = top or max((y for _, y in points), default=0.0) or 1.0

    def path(line: Sequence[tuple[float, float]]) -> str:
        width, height = _WIDTH - _LEFT, _BOTTOM - _TOP
        return " ".join(f"{_LEFT + width * x / last:.1f},{_BOTTOM - height * y / top:.1f}" for x, y in line)

    named, largest = list(zip("ab", series, strict=False)), f"{top:,.0f}" if top >= 100 else f"{top:.3g}"
    legend = "".join(f'<span class="{kind}">{escaped(name)}</span>' for kind, name in named)
    lines = "".join(f'<polyline class="{kind}" points="{path(series[name])}"/>' for kind, name in named)
    return (
        f'<figure><figcaption>{escaped(title)}{legend}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}">'
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT}" height="{_BOTTOM - _TOP}"/>{lines}'
        f'<text x="0" y="{_TOP + 12}">{largest}</text><text x="0" y="{_BOTTOM}">0</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 8}" text-anchor="end">{escaped(until)}</text></svg></figure>'
    )
