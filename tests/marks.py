"""Parameters of tests that the fast suite leaves to the slow one, which runs them in turns."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any):
    """Parameters of one slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def few(values: Iterable[Any], fast: int = 1) -> list[Any]:
    """All of these, and only the first so many are fast."""
    return [value if place < fast else slow(value) for place, value in enumerate(values)]
