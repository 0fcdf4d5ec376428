"""JSON as it is taken from others: every key once, finite numbers, and nested no deeper than all readers can follow.

JSON is nested at most MAX_NESTED deep: how deep Python itself can follow depends on who calls, and a text must be good
or bad whoever reads it.
"""

import collections
import json
import math
from typing import Any

import numpy as np

from ferrum_jax.inputs.params.schema import number_of
from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.errors import FieldError

MOST_VALUES = 1_000_000  # of one body
MAX_NESTED = 100
MAX_DIGITS = 4000  # of a whole number; Python reads 4,300 unless it is told otherwise


def read_body(content: bytes) -> dict[str, Any]:
    """The object of a body. Raises FieldError, without a field, for what is none."""
    if (count := num_commas(content)) >= MOST_VALUES:
        raise FieldError(f"the body has {count + 1:,} values; at most {MOST_VALUES:,} are read", None)
    try:
        found = decoded(content.decode())
    except UnicodeDecodeError as error:
        raise FieldError(f"the body is not UTF-8 at byte {error.start + 1}", None) from error
    except JsonError as error:
        raise FieldError(f"the body is {error}", None) from error
    if not isinstance(found, dict):
        raise FieldError(f"the body is a JSON {type(found).__name__}; it must be an object", None)
    return found


def num_commas(content: bytes) -> int:
    """How many commas of a JSON text part its values, looked for only where the text has too many of any kind.

    The decoder makes millions of small values without once letting another thread run, so they are counted before.
    """
    count = content.count(b",")
    if count < MOST_VALUES:
        return count
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = np.frombuffer(plain, np.uint8)
    is_inside = np.bitwise_xor.accumulate(found == ord('"'))
    return int(np.count_nonzero((found == ord(",")) & ~is_inside))


class JsonError(ValueError):
    """A text that is not JSON as it is read here."""


class NestedTooDeeply(JsonError):
    """A value whose parts stand in more than MAX_NESTED lists and objects."""

    def __init__(self) -> None:
        super().__init__(f"nested too deeply; at most {MAX_NESTED} levels are read")


def decoded(text: str) -> Any:
    """The value of JSON. Raises JsonError."""
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise NestedTooDeeply from error
    except ValueError as error:
        raise JsonError(f"not valid JSON: {error}") from error
    if text.count("[") + text.count("{") > MAX_NESTED:
        _refuse_deep(value)
    return value


def _refuse_deep(value: object) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_NESTED):
        parts = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in parts if isinstance(part, dict | list)]
    if level:
        raise NestedTooDeeply


def _constant(name: str) -> float:
    """Minus infinity, which a logit_bias may be; the other constants that JSON lacks are refused."""
    if name != "-Infinity":
        raise ValueError(f"{name} is not a JSON number")
    return -math.inf


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits; at most {MAX_DIGITS} are read")
    return int(text)


def _number(text: str) -> float:
    found = number_of(text)
    if math.isinf(found):
        raise ValueError(f"{text[:40]} is too large for a number")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"keys given twice: {quoted(sorted(key for key, count in counts.items() if count > 1))}")
    return found


_DECODER = json.JSONDecoder(
    parse_constant=_constant, parse_float=_number, parse_int=_whole_number, object_pairs_hook=_object
)
