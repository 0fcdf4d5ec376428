"""Lines of input as JSON objects, and as bytes that are equal for equal content."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any


class LineError(ValueError):
    """A line without a usable custom_id; carries the error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def load_line(raw: bytes) -> dict[str, Any]:
    """The line's object. Raises LineError."""
    try:
        text = raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise LineError("invalid_utf8", f"not UTF-8 at byte {error.start + 1}; write the file as UTF-8") from error
    try:
        line = _DECODER.decode(text)
    except RecursionError as error:
        raise LineError("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise LineError("invalid_json", f"not valid JSON: {error}") from error
    if not isinstance(line, dict):
        raise LineError("invalid_json", f"is a {type(line).__name__}; each line must be a JSON object")
    return line


def canonical(line: Mapping[str, Any], packed: array[int] | None) -> bytes:
    """The line's bytes, whatever its spacing and key order. Raises LineError for what has none.

    packed: its prompt_token_ids, where they can be packed; they stand behind the JSON and a newline, which is in no
    JSON that is encoded here: that is faster.
    """
    try:
        if packed is None:
            return _ENCODER.encode(line).encode()
        return _ENCODER.encode({**line, "prompt_token_ids": None}).encode() + b"\n" + packed.tobytes()
    except UnicodeEncodeError as error:
        raise LineError("invalid_json", "holds half of a surrogate pair; write both halves") from error
    except RecursionError as error:
        raise LineError("invalid_json", "nested too deeply") from error
    except ValueError as error:
        raise LineError("invalid_json", f"not valid JSON: {error}") from error


def custom_id_of(line: Mapping[str, Any]) -> str:
    """Raises LineError where there is none."""
    if "custom_id" not in line:
        raise LineError("missing_custom_id", "has no custom_id; give every row one, it names the answer")
    custom_id = line["custom_id"]
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id is {custom_id!r}; it must be a string that is not empty"
        raise LineError("missing_custom_id", message)
    return custom_id


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"keys given twice: {sorted({key for key in keys if keys.count(key) > 1})}")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False)
