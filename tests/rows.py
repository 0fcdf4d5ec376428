"""Rows of a test that are data: they stand in a file of JSON beside it, of its name."""

import json
import pathlib
from typing import Any


def rows_beside(test_file: str) -> dict[str, Any]:
    """The tables of a test file, each by what it is of; NaN and Infinity are numbers."""
    return json.loads(pathlib.Path(test_file).with_suffix(".json").read_text())
