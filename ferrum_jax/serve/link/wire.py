"""Messages between HTTP and engine: short lists of plain values, in one process as they are, else as JSON.

    to the engine      ["add", id, token_ids, params, options]   ["embed", id, text, options]   ["abort", id]
                       ["score", id, [text, text], options]   ["opened"]
                       ["load_adapter", id, name, path, replaces]   ["unload_adapter", id, name]
                       ["control", id, verb, arguments]
    from the engine    ["ready", facts]   ["deltas", [delta, ..]]   ["refused", id, kind, message]
                       ["done", id, result]   ["changed", facts]
                       ["vector", id, base64 of float32, num_tokens, num_cached]
                       ["beat", facts]   ["stats", facts]   ["end", "drain" or "stop"]

A delta is one of `ferrum_jax.core.delta`, without what is beside it. The kind of a refusal is "invalid" (the request is
wrong), "failed" (the engine), "aborted" (by who owns the engine) or "slow" (its reader). What changed comes before the
answers that it concerns. Over a socket a message is its length in four bytes and its JSON:
whoever breaks into the process that reads from the network can send values and nothing else.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

MAX_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_json = json.JSONEncoder(separators=(",", ":")).encode

Message = list[Any]


def send(connection: socket.socket, messages: Iterable[Message]) -> None:
    """Writes all of them at once. Raises OSError where nobody is there to read."""
    connection.sendall(b"".join(map(framed, messages)))


def framed(message: Message) -> bytes:
    content = _json(message).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"a message of {len(content):,} bytes; at most {MAX_BYTES:,} are sent")
    return _LENGTH.pack(len(content)) + content


def received(connection: socket.socket) -> Iterator[Message]:
    """What comes until the connection is closed. Raises ValueError for what is no message."""
    unframer = Unframer()
    while True:
        try:
            content = connection.recv(1 << 18)
        except OSError:  # who sent it is gone, as at the end of what it sent
            return
        if not content:
            return
        yield from unframer.feed(content)


class Unframer:
    """Messages of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, content: bytes) -> Iterator[Message]:
        """The messages that are complete now. Raises ValueError for what is none."""
        self._rest += content
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest, start)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length:,} bytes is announced; at most {MAX_BYTES:,} are read")
            end = start + _LENGTH.size + length
            if len(self._rest) < end:
                break
            yield json.loads(self._rest[start + _LENGTH.size : end])
            start = end
        del self._rest[:start]
