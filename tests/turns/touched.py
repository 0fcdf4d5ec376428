"""The slow tests that run in a turn: a sixth of them and those that a change touches, as far as their time allows.

A changed test runs itself, and a changed golden its own tests. Another changed file runs the tests that have its name
or its folder's, then those that import it, unless these take more than a sixth of all: then it is everybody's, and the
sixths see to it. What is nearest to the change comes first, until its folder or the whole has used up its seconds; a
folder's first unit runs however long it takes. The sixth has what is left of the turn's seconds: the units for which
there are none are others each time that the sixth has its turn, and are said.
"""

import ast
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.turns.sixths import NUM_SIXTHS, file_of, sixths

TURN_S, ALL_S, FOLDER_S = 800, 150, 50  # CPU seconds of a turn; of what changes touch in it; of each folder's
_ROOTS = ("ferrum_jax", "pallas_kernels", "checkpoints", "scripts")
_GOLDENS = "tests/goldens/"
_SECONDS: dict[str, float] = tomllib.loads((Path(__file__).parent / "seconds.toml").read_text())
_OTHER_S = 3.0

Unit = tuple[str, str]


class Reached(NamedTuple):
    """Units by how near they are to a change, 0 the nearest, and which; and changes that are everybody's."""

    near: dict[Unit, tuple[int, str]]
    everybodys: list[str]


class Turn(NamedTuple):
    """The units that run, the changes that touched them, and those that the changes touch and that do not run.

    late: units of the sixth for which the turn has no time.
    """

    kept: set[Unit]
    touched: dict[Unit, str]
    left_out: list[Unit]
    late: list[Unit]
    everybodys: list[str]


def turn(
    sixth: int, node_ids: Iterable[str], changed: Iterable[str], imports: Mapping[str, set[str]], lap: int = 0
) -> Turn:
    """What runs of these tests. imports: the modules that each test file imports. lap: see `History`."""
    of_unit = sixths(node_ids)
    kept, late = in_time({unit for unit, its in of_unit.items() if its == sixth}, lap)
    found = reached(changed, of_unit, imports)

    def order(unit: Unit) -> tuple:
        """Nearest first; among equals those three turns away, so that three turns see them all."""
        return found.near[unit][0], (of_unit[unit] - sixth - NUM_SIXTHS // 2) % NUM_SIXTHS, unit

    touched, left_out, spent = {}, [], defaultdict[str, float](float)
    for unit in sorted(found.near.keys() - kept, key=order):
        folder, seconds = str(PurePosixPath(unit[0]).parent), seconds_of(unit)
        if (spent[folder] and spent[folder] + seconds > FOLDER_S) or (spent and sum(spent.values()) + seconds > ALL_S):
            left_out.append(unit)
            continue
        spent[folder] += seconds
        touched[unit] = found.near[unit][1]
    return Turn(
        kept | touched.keys(), touched, left_out, [unit for unit in late if unit not in touched], found.everybodys
    )


def in_time(units: set[Unit], lap: int) -> tuple[set[Unit], list[Unit]]:
    """As many as a turn has time for beside what changes touch, in an order that is another in each lap; the others."""
    kept, late, spent = set(), [], 0.0
    for unit in sorted(units, key=lambda unit: zlib.crc32(f"{lap} {unit}".encode())):
        spent += seconds_of(unit)
        if spent <= TURN_S - ALL_S:
            kept.add(unit)
        else:
            spent -= seconds_of(unit)
            late.append(unit)
    return kept, sorted(late)


def seconds_of(unit: Unit) -> float:
    """CPU seconds that a unit is said to take."""
    return _SECONDS.get(unit[0], _OTHER_S)


def reached(changed: Iterable[str], units: Iterable[Unit], imports: Mapping[str, set[str]]) -> Reached:
    by_file: dict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        by_file[unit[0]].append(unit)
    all_s = sum(map(seconds_of, units))
    near: dict[Unit, tuple[int, str]] = {}
    everybodys = []
    for path in sorted(changed):
        steps = [_own(path, by_file), *(_files(names, by_file) for names in _named(path, by_file))]
        importing = _files([file for file in by_file if _imports(path, imports.get(file, set()))], by_file)
        if NUM_SIXTHS * sum(map(seconds_of, importing)) > all_s:
            everybodys.append(path)
        else:
            steps.append(importing)
        for distance, its in enumerate(steps):
            for unit in its:
                near[unit] = min(near.get(unit, (distance, path)), (distance, path))
        if not any(steps) and path not in everybodys:
            everybodys.append(path)
    return Reached(near, everybodys)


def _files(names: Iterable[str], by_file: Mapping[str, list[Unit]]) -> list[Unit]:
    return [unit for name in names for unit in by_file[name]]


def _own(path: str, by_file: Mapping[str, list[Unit]]) -> list[Unit]:
    """The units of a changed test or golden."""
    if path.startswith(_GOLDENS):
        return [unit for its in by_file.values() for unit in its if path.startswith(f"{_GOLDENS}{unit[1]}/")]
    return by_file.get(path, [])


def _named(path: str, by_file: Mapping[str, list[Unit]]) -> tuple[list[str], list[str]]:
    """The test files that have the name of a file or of a folder it is in, and those in folders of such a name."""
    if path in by_file or path.startswith(_GOLDENS):
        return [], []
    *folders, last = PurePosixPath(path).parts
    if last.endswith(".md") or folders[:1] == ["docs"]:
        folders, last = ["house"], ""
    names = {*folders, last.partition(".")[0]} - {"tests", "ferrum_jax", "__init__", ""}
    by_name = [file for file in by_file if any(_alike(name, PurePosixPath(file).stem) for name in names)]
    return by_name, [file for file in by_file if names.intersection(PurePosixPath(file).parts[1:-1])]


def _alike(name: str, test: str) -> bool:
    """Whether the name of a test file is that of another with more words or fewer: check_program's is test_check."""
    words = test.removeprefix("test")
    return f"{words}_".startswith(f"_{name}_") or f"_{name}_".startswith(f"{words}_")


def _imports(path: str, modules: set[str]) -> bool:
    """Whether a module or the package whose face it is behind is among these."""
    if not path.endswith(".py"):
        return False
    return ".".join(PurePosixPath(path.removesuffix("/__init__.py")).with_suffix("").parts) in modules


def imports_of(root: Path, node_ids: Iterable[str]) -> dict[str, set[str]]:
    """The modules that each test file names in its imports."""
    return {file: _named_in(root / file) for file in sorted({file_of(node_id) for node_id in node_ids})}


def _named_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found
