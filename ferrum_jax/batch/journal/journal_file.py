"""A small file of a journal: one JSON object, and after it a line with the checksum of its bytes.

A file of an older version has no such line.
"""

import contextlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.files.json_files import parse_json


def file_of(value: Mapping[str, Any]) -> bytes:
    """The content of the file that holds the object."""
    text = json.dumps(value).encode()
    return b"%s\n%s" % (text, _checksum(text))


def object_in(content: bytes | None) -> dict[str, Any] | None:
    """The object that a file holds; None where there is no file, or a damaged one."""
    text, has_checksum, checksum = (content or b"").partition(b"\n")
    found: Any = None
    if not has_checksum or checksum == _checksum(text):
        with contextlib.suppress(ValueError):
            found = parse_json(text)
    return found if isinstance(found, dict) else None


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)
