"""What HTTP and engine tell one another: short lists of plain values, in one process as they are, else as JSON.

    to the engine      ["add", id, token_ids, params, options]   ["embed", id, text, options]   ["abort", id]
                       ["score", id, [text, text], options]   ["opened"]
                       ["load_adapter", id, name, path, replaces]   ["unload_adapter", id, name]
    from the engine    ["ready", facts]   ["deltas", [delta, ..]]   ["refused", id, kind, message]
                       ["done", id]   ["adapters", names]
                       ["vector", id, base64 of float32, num_tokens, num_cached]
                       ["beat", facts]   ["stats", facts]   ["end", "drain" or "stop"]

A delta is what is new of one choice, with the times of its tokens. The kind of a refusal is "invalid" (the request is
wrong), "failed" (the engine) or "slow" (its reader). Over a socket a message is its length in four bytes and its JSON:
whoever breaks into the process that reads from the network can send values and nothing else.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ferrum_jax.outputs import Logprob, RequestOutput

MAX_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_json = json.JSONEncoder(separators=(",", ":")).encode

Message = list[Any]
Entry = list[tuple[int, float, int]]  # token id, log-probability and rank: of the token that stands there, alternatives


class Delta(NamedTuple):
    """What is new of one choice. is_last: no other choice of the request goes on.

    times_us: when the step of each token was committed, in microseconds of the clock that all processes of a machine
    share (`time.monotonic`).
    """

    id: int
    choice: int
    token_ids: list[int]
    logprobs: list[Entry] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_last: bool
    num_cached_tokens: int
    prompt_logprobs: list[Entry | None] | None
    times_us: list[int]

    def by_token(self) -> list[Delta]:
        """The same, a token at a time: deltas that wait are joined, and nothing may depend on which."""
        last = len(self.token_ids) - 1
        return [
            self._replace(
                token_ids=[token_id],
                logprobs=None if self.logprobs is None else self.logprobs[place : place + 1],
                finish_reason=self.finish_reason if place == last else None,
                stop_reason=self.stop_reason if place == last else None,
                is_last=self.is_last and place == last,
                times_us=self.times_us[place : place + 1],
            )
            for place, token_id in enumerate(self.token_ids)
        ] or [self]


def delta_of(request_id: int, output: RequestOutput, time_us: int) -> Delta:
    """An output of one choice, as `RequestOptions.deltas` asks for it. time_us: when its step was committed."""
    (choice,) = output.outputs
    prompt = output.prompt_logprobs
    return Delta(
        request_id,
        choice.index,
        list(choice.token_ids),
        None if choice.logprobs is None else [_entry(each) for each in choice.logprobs],
        choice.finish_reason,
        choice.stop_reason,
        output.finished,
        output.num_cached_tokens,
        None if prompt is None else [None if each is None else _entry(each) for each in prompt],
        [time_us] * len(choice.token_ids),
    )


def joined(first: Delta, then: Delta) -> Delta:
    """What two deltas of one choice say, as one."""
    both = (first.logprobs, then.logprobs)
    logprobs = None if both == (None, None) else [*(first.logprobs or ()), *(then.logprobs or ())]
    return then._replace(
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs if then.prompt_logprobs is None else then.prompt_logprobs,
        times_us=first.times_us + then.times_us,
    )


def _entry(found: dict[int, Logprob]) -> Entry:
    return [(token_id, each.logprob, each.rank) for token_id, each in found.items()]


def send(connection: socket.socket, messages: Iterable[Message]) -> None:
    """Writes all of them at once. Raises OSError where nobody is there to read."""
    connection.sendall(b"".join(map(framed, messages)))


def framed(message: Message) -> bytes:
    content = _json(message).encode()
    if len(content) > MAX_BYTES:
        raise ValueError(f"a message of {len(content):,} bytes; at most {MAX_BYTES:,} are sent")
    return _LENGTH.pack(len(content)) + content


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
