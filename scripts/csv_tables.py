"""Tables of the documentation that are data: docs/tables/*.csv, which scripts write and the site shows.

A page has a line `[What it holds](tables/NAME.csv)`. A code host opens the file as a table; `scripts/docs_hook.py` puts
the table in the line's place. The first row is the head; the first column is shown as code, unless it is called "what".
`#NAME` behind the file shows a part: the rows that begin with NAME (dashes for its spaces), or else the first column
and those whose head begins with NAME.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tables"
LINE = re.compile(r"(?m)^\[([^\]\n]+)\]\((?:\.\./)*tables/(\w+)\.csv(?:#([\w-]+))?\)$")

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
    head, *rows = table
    first_of = _as_code if head[0] != "what" else _as_text
    body = [[first_of(first), *map(_as_text, others)] for first, *others in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def _as_text(cell: str) -> str:
    """A cell as a page's table takes it; what is code in it stays."""
    return re.sub(r"(`+[^`]*`+)|([|*<])", lambda found: found[1] or f"\\{found[2]}", cell)


def _as_code(cell: str) -> str:
    """A cell of the first column: code, unless it marks its code itself."""
    return f"`{cell}`" if cell and "`" not in cell else cell


def with_tables(markdown: str) -> str:
    """The text of a page with its tables in place of the lines that name them."""
    return LINE.sub(lambda found: as_markdown(_part(read(found[2]), found[3] or "")), markdown)


def _part(table: Table, name: str) -> Table:
    """The rows that begin with a name, or the columns whose head does. Raises ValueError if neither is there."""
    if rows := [row for row in table if row[0].replace(" ", "-") == name]:
        return [row[1:] for row in (table[0], *rows)]
    shown = [number for number, head in enumerate(table[0]) if number == 0 or head.startswith(name)]
    if len(shown) == 1:
        raise ValueError(f"a page shows rows or columns of a table that begin with {name!r}; it has {list(table[0])}")
    return [[row[number] for number in shown] for row in table]


def write(tables: Mapping[str, Table], script: str, *, check: bool) -> None:
    """Writes tables by name. check: raises SystemExit where a file differs, and names the script that makes it."""
    for name, table in tables.items():
        path = FOLDER / f"{name}.csv"
        if not check:
            path.write_text(as_csv(table), encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != as_csv(table):
            raise SystemExit(f"{path.relative_to(ROOT)} differs; run python -m scripts.{script}")
