"""Digests in a line and in an output, which a reader makes again to find changes.

A line's answer carries the seed it was drawn with, digests of its request, tokens and images, and one of the line as a
whole. The report carries a digest of all lines in their order. Digests find what changed by accident or with a text
editor, in every line and without the model; a forger makes them anew, and is found where a row is answered again.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RECORD = "record"  # the field of a line's response, beside the body that OpenAI's clients read
LINE = "line"  # the entry of it that digests the others
REQUEST = "request"  # the entry that digests what was asked
_DIGITS = 16  # of a digest in a line, hexadecimal
_OF_OUTPUT_BYTES = 32
_USAGE = re.compile(rb'"usage": \{"prompt_tokens": (\d+)(?:, "completion_tokens": (\d+))?')

json_of = json.JSONEncoder(allow_nan=False).encode  # of a string alone it is fast; of an object it makes one first
_LINE = '{"id": "batch_req_%s", "custom_id": %s, "response": %s, "error": %s}\n'


def line_of(id: str, custom_id: str | None, response: str, error: str) -> bytes:
    """A line with its newline. response, error: JSON."""
    return (_LINE % (id, json_of(custom_id), response, error)).encode()


def tokens_digest(choices: Iterable[Sequence[int]]) -> str:
    """A digest of the token ids of all choices, in their order."""
    state = hashlib.blake2b(digest_size=_DIGITS // 2)
    for token_ids in choices:
        state.update(len(token_ids).to_bytes(8, "little") + array("q", token_ids).tobytes())
    return state.hexdigest()


def images_digest(digests: Iterable[str]) -> str:
    """One digest of those of a row's images, which may lie outside its input and be replaced there."""
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=_DIGITS // 2).hexdigest()


def recorded_response(id: str, custom_id: str | None, body: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """The response of a line as JSON. said: what its record says beside the digest of the line."""
    text, record = json_of(body), json_of(said)
    line = f'"{LINE}": "{_line_digest(id, custom_id, text, record)}"}}'
    record = f"{record[:-1]}, {line}" if said else f"{{{line}"  # encoding once more takes longer than all of this
    return f'{{"status_code": 200, "request_id": "req_{id}", "body": {text}, "{RECORD}": {record}}}'


def _line_digest(id: str, custom_id: str | None, body: str, said: str) -> str:
    """The digest of an answered line. body, said: JSON as `json_of` writes it, also once it was read."""
    content = "\n".join((id, json_of(custom_id), body, said))
    return hashlib.blake2b(content.encode(), digest_size=_DIGITS // 2).hexdigest()


def usage_in(line: bytes) -> tuple[int, int]:
    """The tokens that a line's answer read and wrote, as it says itself without being parsed; 0 where it does not."""
    found = _USAGE.match(line, line.rfind(b'"usage": '))  # in a text the quotes would be escaped
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


class OutputDigest:
    """The digest of all lines of an output, whichever are added first: a sum over lines with their numbers."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, index: int, line: bytes) -> None:
        """index: the line's place, from 0. line: with its newline."""
        state = hashlib.blake2b(b"%d\n" % index, digest_size=_OF_OUTPUT_BYTES)
        state.update(line)
        self._sum += int.from_bytes(state.digest(), "little")

    @property
    def text(self) -> str:
        """In hexadecimal."""
        return f"{self._sum % (1 << 8 * _OF_OUTPUT_BYTES):0{2 * _OF_OUTPUT_BYTES}x}"
