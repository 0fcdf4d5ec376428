"""One word per thing: classes, modules and the glossary's words each name one thing.

Methods such as `find` and `add` may repeat, for their class says of what.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import re
from collections.abc import Iterable

from tests.support import ROOT

PACKAGES = ("ferrum_jax", "pallas_kernels", "checkpoints")
GLOSSARY = ROOT / "docs" / "glossary.md"

# Classes that may share a name, and why.
SHARED_CLASSES = {"Case": "each op's cases.py has its own, and what runs them takes any"}
# Files that stand in more than one folder, and why.
SHARED_FILES = {
    "pallas_kernels": {  # every op's folder is laid out alike, so that one who knows one finds the way in all
        *("cases.py", "config.py", "kernel.py", "math.py", "oracle.py", "schedule.py", "stages.py"),
        *("xla.py", "mosaic_tpu.py"),  # an op's implementations, as EngineConfig names them
    },
    "ferrum_jax/commands": {"compile.py", "convert.py", "plan.py"},  # a command's file has the command's name
}


def _sources() -> list[pathlib.Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def _classes() -> dict[str, list[str]]:
    """The places of top-level classes by name; a leading underscore makes no other name."""
    found = collections.defaultdict(list)
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def _is_shared(path: pathlib.Path) -> bool:
    inside = path.relative_to(ROOT)
    return any(inside.is_relative_to(folder) and path.name in names for folder, names in SHARED_FILES.items())


def _words() -> list[str]:
    table = GLOSSARY.read_text().partition("\n## Letters")[0]
    rows = re.findall(r"(?m)^\| ([^|]+) \|", table)[1:]  # without the head
    return [word.strip() for row in rows for word in row.split(",")]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def test_no_two_classes_have_one_name():
    assert {name: places for name, places in _classes().items() if len(places) > 1}.keys() == SHARED_CLASSES.keys()


def test_no_two_modules_have_one_name():
    names = [path.stem.lstrip("_") for path in _sources() if path.name != "__init__.py" and not _is_shared(path)]
    assert not _repeated(names)


def test_the_exceptions_are_needed():
    files = collections.Counter(path.name for path in _sources())
    assert all(files[name] > 1 for names in SHARED_FILES.values() for name in names)


def test_a_word_has_one_row_in_the_glossary():
    assert len(_words()) > 80 and not _repeated(_words())


def test_classes_that_the_glossary_names_exist():
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", GLOSSARY.read_text()))
    assert named and named <= _classes().keys()
