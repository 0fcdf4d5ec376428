"""The bytes of a body as the JSON object that they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ferrum_jax.openai.errors import FieldError
from ferrum_jax.openai.json_text import JsonError, decoded

MOST_VALUES = 1_000_000  # of one body


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
