"""The parts of a page, as text. All that a part is given is escaped, but for what is called html."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

from ferrum_jax.pages.style import STYLE


def escaped(value: object) -> str:
    return html.escape(str(value))


def document(title: str, *parts_html: str) -> str:
    """The whole page."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style><main>{''.join(parts_html)}</main></html>\n"
    )


def head(above: str, name: str, kind: str, state: str, beside: str = "") -> str:
    """What the page is about, and how that stands. kind: good, bad or soft."""
    more = f'<span class="soft">{escaped(beside)}</span>' if beside else ""
    return (
        f'<div class="soft">{escaped(above)}</div><h1>{escaped(name)}</h1>'
        f'<div><span class="state {kind}">{escaped(state)}</span>{more}</div>'
    )


def grid(kind: str, parts_html: Iterable[str]) -> str:
    """Parts side by side. kind: tiles, plots or facts."""
    return f'<div class="grid {kind}">{"".join(parts_html)}</div>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    kind: str = "",
    *,
    note: str = "",
    look: Callable[[str, str | None], str] = lambda column, cell: "",
) -> str:
    """A card with a table. head: () for none. look: the class of a column's cell, or with None of its head."""

    def row(tag: str, cells: Sequence[str], whose: Sequence[str | None]) -> str:
        kinds = [look(column, cell) for column, cell in zip(head, whose, strict=True)] if head else [""] * len(cells)
        marks = [f' class="{each}"' if each else "" for each in kinds]
        return f"<tr>{''.join(f'<{tag}{m}>{escaped(c)}</{tag}>' for m, c in zip(marks, cells, strict=True))}</tr>"

    top = row("th", head, [None] * len(head)) if head else ""
    below = f'<p class="soft">{escaped(note)}</p>' if note else ""
    return (
        f'<div class="card {kind}"><table>{top}{"".join(row("td", each, each) for each in rows)}</table>{below}</div>'
    )
