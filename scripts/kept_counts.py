"""Counts of kernels that are kept as data, one line each, and what has become worse since: of GPUs and of TPUs.

A file is {"tools": versions, "launches": {launch: {part: counts}}}. A part is one of a GPU launch's kernels, or one of
the generations of TPUs that a launch is compiled for.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

WORSE = 1.02  # times what is kept
Launches = Mapping[str, Mapping[str, Any]]
Columns = Mapping[str, Mapping[str, float]]  # by part: what must not get worse


def parse(parser: argparse.ArgumentParser, known: Sequence[str], file: pathlib.Path) -> argparse.Namespace:
    """The command line of a script that keeps counts of named things in a file: which of them, --write, --check."""
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--write", action="store_true", help=f"keep the counts in {file.name}")
    parser.add_argument("--check", action="store_true", help="fail where a count is worse than the one that is kept")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(known):
        parser.error(f"nothing is called {sorted(unknown)}; see --help")
    arguments.names = arguments.names or known
    return arguments


def read(path: pathlib.Path) -> dict[str, Any]:
    """The file, or one of nothing where it is not there."""
    return json.loads(path.read_text()) if path.exists() else {"tools": {}, "launches": {}}


def write(path: pathlib.Path, tools: Mapping[str, str], launches: Launches) -> None:
    """Writes launches and parts in the order in which they are given."""
    lines = []
    for launch, parts in launches.items():
        own = [f'  "{name}": {json.dumps(one, sort_keys=True)}' for name, one in parts.items()]
        lines.append(f' "{launch}": {{\n' + ",\n".join(own) + "\n }")
    path.write_text(f'{{"tools": {json.dumps(tools)}, "launches": {{\n' + ",\n".join(lines) + "\n}}\n")


def end_if(found: Sequence[str], counted_with: Mapping[str, str], path: pathlib.Path) -> None:
    """Raises SystemExit with what is worse than what the file keeps, and with the compilers of both."""
    if found:
        kept_with = read(path)["tools"]
        sys.exit("\n".join([*found, f"kept with {kept_with}, counted with {counted_with}; --write keeps the new"]))


def worse(before: Columns, counted: Columns) -> list[str]:
    """What is worse by more than 2 % than the columns of the same part before, and parts that had none."""
    found = []
    for part, columns in counted.items():
        if part not in before:
            found.append(f"{part}: nothing is kept")
            continue
        old = before[part]
        found += [
            f"{part}: {what} {old.get(what, 0)} -> {n}" for what, n in columns.items() if n > WORSE * old.get(what, 0)
        ]
    return found
