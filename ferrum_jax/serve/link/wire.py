"""Messages between HTTP and engine: short lists of plain values, in one process as they are, else as JSON.

    to the engine      ["add", id, token_ids, params, options]   ["abort", id]   ["opened"]
                       ["read", id, kind, content]
                       ["load_adapter", id, name, path, replaces]   ["unload_adapter", id, name]
                       ["control", id, verb, arguments]
    from the engine    ["ready", facts]   ["deltas", [delta, ..]]   ["refused", id, kind, message]
                       ["done", id, result]   ["changed", facts]
                       ["beat", facts]   ["stats", facts]   ["end", "drain" or "stop"]

A delta is one of `ferrum_jax.core.delta`, without what is beside it. A content is one of
`openai.readings.contents_of`, and its answer an output of `core.outputs` by its fields: arrays in base64, and of the
tokens their number. The kind of a refusal is "invalid" (the request is wrong), "failed" (the engine), "aborted" (by who
owns the engine) or "slow" (its reader). What changed comes before the answers that it concerns. Over a socket a message
is its length in four bytes and its JSON: whoever breaks into the process that reads from the network can send values
and nothing else.
"""

import base64
import dataclasses
import json
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ferrum_jax.core.outputs import ClassOutput, EmbeddingOutput, RewardOutput, ScoreOutput
from ferrum_jax.openai.asked import CLASSIFIES, EMBEDS, REWARDS, SCORES

MAX_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_json = json.JSONEncoder(separators=(",", ":")).encode

Message = list[Any]
_OUTPUTS = {EMBEDS: EmbeddingOutput, SCORES: ScoreOutput, CLASSIFIES: ClassOutput, REWARDS: RewardOutput}
_ARRAYS = ("embedding", "probs", "logits")  # [n] float32


def wire_reading(output: Any) -> dict[str, Any]:
    """The output of a text that was read, as it is sent."""
    found = {each.name: getattr(output, each.name) for each in dataclasses.fields(output) if each.name != "prompt"}
    found["prompt_token_ids"] = len(found["prompt_token_ids"])
    for name in found.keys() & _ARRAYS:
        found[name] = base64.b64encode(np.ascontiguousarray(found[name], "<f4").tobytes()).decode()
    return found


def reading_of(kind: int, sent: Mapping[str, Any]) -> Any:
    """The output as it was sent, without its prompt. Its token ids are of use by their number alone."""
    found = {**sent, "prompt_token_ids": tuple(range(sent["prompt_token_ids"]))}
    for name in found.keys() & _ARRAYS:
        found[name] = np.frombuffer(base64.b64decode(found[name]), "<f4")
    made = _OUTPUTS[kind]
    return made(**found) if kind == SCORES else made(prompt=None, **found)


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
