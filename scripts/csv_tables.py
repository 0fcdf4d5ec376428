"""Tables of the documentation that are data: docs/tables/*.csv, which scripts write and the site shows.

A page has a line `[What it holds](tables/NAME.csv)`. A code host opens the file as a table; `scripts/docs_hook.py` puts
the table in the line's place. The first row is the head, and the first column is shown as code. Behind `#PREFIX` only
the first column is shown and those whose head begins so.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tables"
LINE = re.compile(r"(?m)^\[([^\]\n]+)\]\((?:\.\./)*tables/(\w+)\.csv(?:#(\w+))?\)$")

Table = Sequence[Sequence[str]]


def read(name: str) -> list[list[str]]:
    """The rows of a table, its head first."""
    return list(csv.reader(io.StringIO((FOLDER / f"{name}.csv").read_text(encoding="utf-8"))))


def as_csv(table: Table) -> str:
    """The text of a table's file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """The table as a page of the site has it."""
    head, *rows = [[re.sub(r"([|*<])", r"\\\1", cell) for cell in row] for row in table]
    body = [[f"`{first}`" if first else "", *others] for first, *others in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def with_tables(markdown: str) -> str:
    """The text of a page with its tables in place of the lines that name them."""
    return LINE.sub(lambda found: as_markdown(_columns(read(found[2]), found[3] or "")), markdown)


def _columns(table: Table, prefix: str) -> Table:
    """The first column, and those whose head begins with a prefix. Raises ValueError where none does."""
    shown = [number for number, head in enumerate(table[0]) if number == 0 or head.startswith(prefix)]
    if len(shown) == 1:
        raise ValueError(f"a page shows columns of a table that begin with {prefix!r}, and it has {list(table[0])}")
    return [[row[number] for number in shown] for row in table]


def write(tables: Mapping[str, Table], script: str, *, check: bool) -> None:
    """Writes tables by name. check: raises SystemExit where a file differs, and names the script that makes it."""
    FOLDER.mkdir(exist_ok=True)
    for name, table in tables.items():
        path = FOLDER / f"{name}.csv"
        if not check:
            path.write_text(as_csv(table), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != as_csv(table):
            raise SystemExit(f"{path.relative_to(ROOT)} differs; run python -m scripts.{script}")
