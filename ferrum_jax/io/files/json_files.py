"""JSON files that somebody else wrote."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ValueError naming the file when it is absent or not an object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; it must be an object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file, {} when there is no such file. Raises ValueError when it is damaged."""
    return read_json(path) if path.exists() else {}


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, NaN, infinities, and too deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"it holds {text[:40]}, which is not a number")
