"""What each suite does with each golden: the words of tests/goldens/families.toml."""

import pathlib
import tomllib

import pytest

from scripts.goldens.weights import Goldens

GOLDENS = Goldens(pathlib.Path(__file__).parent / "goldens")
TABLE: dict[str, dict[str, str | bool]] = tomllib.loads((GOLDENS / "families.toml").read_text())
_MARKS = {"fast": (), "slow": (pytest.mark.slow,), "long": (pytest.mark.slow, pytest.mark.long)}


def goldens(suite: str, *words: str | bool) -> tuple[str, ...]:
    """The goldens that have one of these words for a suite, or any word where none is given."""
    return tuple(name for name, row in TABLE.items() if suite in row and (row[suite] in words or not words))


def marked(name: str, speed: str | bool):
    """A golden as a test's parameter that is "fast", "slow" or "long"."""
    return pytest.param(name, marks=_MARKS[str(speed)])
