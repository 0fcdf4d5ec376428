"""Lines of input as JSON objects, and as bytes that are equal for equal content.

A row of columns that cannot become an object is written as a line that says why.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.json_text import JsonError, decoded

_UNREADABLE = "\0unreadable"  # a key that nobody gives a field


class LineError(ValueError):
    """A line without a usable custom_id. code: of the error. said: the text that it has in place of a custom_id."""

    def __init__(self, code: str, message: str, said: str | None = None) -> None:
        super().__init__(message)
        self.code, self.said = code, said


def load_line(raw: bytes) -> dict[str, Any]:
    """The line's object. Raises LineError."""
    line = load_value(raw)
    if not isinstance(line, dict):
        raise LineError("invalid_json", f"is a {type(line).__name__}; each line must be a JSON object")
    return line


def load_value(raw: bytes) -> Any:
    """The line's JSON value, whether an object or not. Raises LineError."""
    try:
        return decoded(raw.decode().removeprefix("\ufeff"))
    except JsonError as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError):  # which counts lines too, and this is one
            raise LineError("invalid_json", f"not valid JSON: {cause.msg} at character {cause.pos + 1}") from error
        raise LineError("invalid_json", str(error)) from error
    except UnicodeDecodeError as error:
        raise LineError("invalid_utf8", f"not UTF-8 at byte {error.start + 1}; write the file as UTF-8") from error


def unreadable_line(custom_id: object, why: str) -> bytes:
    """The line, with its newline, for a row of columns that cannot become an object; `refuse_unreadable` says `why`."""
    custom_id = custom_id if isinstance(custom_id, str) else None
    return json.dumps({"custom_id": custom_id, _UNREADABLE: why}).encode() + b"\n"


def refuse_unreadable(line: Mapping[str, Any]) -> None:
    """Raises ValueError for a line that `unreadable_line` made."""
    if _UNREADABLE in line:
        raise ValueError(line[_UNREADABLE])


def canonical(line: Mapping[str, Any], packed: array[int] | None) -> bytes:
    """The line's bytes, whatever its spacing and key order. Raises LineError for what has none.

    packed: its prompt_token_ids, where they can be packed. Their bytes follow the JSON after a newline, which encoded
    JSON never holds; that is faster than encoding them.
    """
    try:
        if packed is None:
            return _ENCODER.encode(line).encode()
        return _ENCODER.encode({**line, "prompt_token_ids": None}).encode() + b"\n" + packed.tobytes()
    except UnicodeEncodeError as error:
        raise LineError("invalid_json", "holds half of a surrogate pair; write both halves") from error
    except ValueError as error:
        raise LineError("invalid_json", f"not valid JSON: {error}") from error


def custom_id_of(line: Mapping[str, Any]) -> str:
    """Raises LineError where there is none."""
    if _UNREADABLE in line and not isinstance(line.get("custom_id"), str):
        raise LineError("invalid_row", f"{line[_UNREADABLE]}")
    if "custom_id" not in line:
        raise LineError("missing_custom_id", "has no custom_id; give every row one, it names the answer")
    custom_id = line["custom_id"]
    if not isinstance(custom_id, str) or not custom_id:
        message = f"custom_id is {quoted(custom_id)}; it must be a string that is not empty"
        said = str(custom_id) if isinstance(custom_id, int | float) and not isinstance(custom_id, bool) else None
        raise LineError("missing_custom_id", message, said)
    return custom_id


_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False)
