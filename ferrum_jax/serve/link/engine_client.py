"""EngineClient: the engine as HTTP sees it, on one event loop; and the two links that lead to it.

Each request is a `Reply`, which buffers at most MOST_UNREAD_TOKENS: who reads too slowly is cut off, so that neither
the engine nor this process's memory waits for it. A `Link` takes messages of `wire.py`: `LocalLink` to an engine
in this process, `PipeLink` to one in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ferrum_jax.core.delta import Delta
from ferrum_jax.serve.link.outbox import Outbox
from ferrum_jax.serve.link.wire import Message, Unframer, framed

MOST_UNREAD_TOKENS = 8192


class RequestRefused(ValueError):
    """The engine cannot serve this request."""


class EngineLost(RuntimeError):
    """The engine failed, or is no longer there."""


class RequestAborted(EngineLost):
    """Who owns the engine ended the request."""


class ReaderTooSlow(RuntimeError):
    """Tokens came faster than they were read, and the buffer is full."""


class EngineDone(NamedTuple):
    """Answers a call. result: the call's JSON result; None if it returns nothing."""

    result: Any


class Link(Protocol):
    """The way to an engine. receive: set by the client; called on its loop with what comes."""

    receive: Callable[[Sequence[Message]], None]

    def send(self, message: Message) -> None: ...


class Reply:
    """The results of one request, for one reader."""

    def __init__(self, request_id: int, leave: Callable[[Reply], None]) -> None:
        """leave: called with this, where nobody is to work on it any more."""
        self.id = request_id
        self.has_ended = False
        self.on_slow: Callable[[], None] = lambda: None  # its reader is cut
        self.on_end: Callable[[], None] = lambda: None  # the engine has no more work with it
        self._leave = leave
        self._items: deque[Delta | EngineDone | Exception] = deque()
        self._num_unread = 0
        self._filled = asyncio.Event()

    def put(self, item: Delta | EngineDone | Exception) -> None:
        if isinstance(item, Delta):
            self._num_unread += len(item.token_ids)
            self.has_ended = item.is_last
        else:
            self.has_ended = True
        self._items.append(item)
        self._filled.set()
        if self._num_unread > MOST_UNREAD_TOKENS and not self.has_ended:
            self._leave(self)
            self.cut(f"{self._num_unread} tokens were not read")

    def cut(self, why: str) -> None:
        """Its reader is too slow: what waits for it is dropped."""
        self._items.clear()
        self.put(ReaderTooSlow(why))
        self.on_slow()

    async def next(self) -> Delta | EngineDone:
        """Waits for the next result. Raises the error that ended the request."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, Delta):
            self._num_unread -= len(item.token_ids)
        return item


class EngineClient:
    """facts: of the model, empty until the engine is ready. beat, stats: what it said last of itself, and when."""

    def __init__(self, link: Link) -> None:
        self.facts: Mapping[str, Any] = {}
        self.ready = asyncio.Event()
        self.beat: Mapping[str, Any] = {}
        self.last_beat = time.monotonic()
        self.stats: Mapping[str, Any] = {}
        self.lost: str | None = None
        self.on_stats: Callable[[Mapping[str, Any]], None] = lambda stats: None
        self.on_order: Callable[[str], None] = lambda order: None  # "drain" or "stop"
        self._link = link
        self._ids = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        link.receive = self._receive

    @property
    def num_open(self) -> int:
        return len(self._replies)

    def ask(self, kind: str, *rest: Any) -> Reply:
        """A request of its own, by a message of `wire.py`; rest: what stands in it behind the id. Raises EngineLost."""
        if self.lost is not None:
            raise EngineLost(self.lost)
        reply = Reply(next(self._ids), self.end)
        self._replies[reply.id] = reply
        self._send([kind, reply.id, *rest])
        return reply

    def end(self, reply: Reply) -> None:
        """Nobody reads it any more: what runs for it ends."""
        if self._replies.pop(reply.id, None) is not None:
            self._send(["abort", reply.id])
            reply.on_end()

    def tell_opened(self) -> None:
        """Says that requests are taken."""
        self._send(["opened"])

    def _send(self, message: Message) -> None:
        if self.lost is None:
            self._link.send(message)

    def lose(self, why: str) -> None:
        """The engine is gone; all that ran has ended with it."""
        if self.lost is None:
            self.lost = why
            replies, self._replies = list(self._replies.values()), {}
            for reply in replies:
                reply.put(EngineLost(why))
                reply.on_end()

    def _receive(self, messages: Sequence[Message]) -> None:
        for kind, *rest in messages:
            if kind == "deltas":
                for delta in rest[0]:
                    self._put(delta[0], Delta(*delta), bool(delta[6]))
            elif kind == "changed":
                self.facts = {**self.facts, **rest[0]}
            elif kind == "done":
                self._put(rest[0], EngineDone(rest[1]), True)
            elif kind == "refused":
                self._refuse(*rest)
            elif kind == "beat":
                self.beat, self.last_beat = rest[0], time.monotonic()
                if self.beat["dead"] is not None:
                    self.lose(self.beat["dead"])
            elif kind == "stats":
                self.stats = rest[0]
                self.on_stats(self.stats)
            elif kind == "ready":
                self.facts, self.last_beat = rest[0], time.monotonic()
                self.ready.set()
            elif kind == "end":
                self.on_order(rest[0])

    def _refuse(self, request_id: int, kind: str, why: str) -> None:
        if kind != "slow":
            self._put(request_id, _REFUSALS[kind](why), True)
        elif (reply := self._replies.pop(request_id, None)) is not None:
            reply.cut(why)
            reply.on_end()

    def _put(self, request_id: int, item: Delta | EngineDone | Exception, ends: bool) -> None:
        reply = self._replies.pop(request_id, None) if ends else self._replies.get(request_id)
        if reply is not None:  # else its reader has left meanwhile
            reply.put(item)
            if ends:
                reply.on_end()


_REFUSALS = {"invalid": RequestRefused, "failed": EngineLost, "aborted": RequestAborted}


class LocalLink:
    """To an engine in this process. take: of its `EngineSide`, which puts what it says into `outbox`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.receive: Callable[[Sequence[Message]], None] = lambda messages: None
        self.take: Callable[[Message], None] = lambda message: None
        self.outbox = Outbox(self._wake)
        self._loop = loop

    def send(self, message: Message) -> None:
        self.take(message)

    def _wake(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(lambda: self.receive(self.outbox.take()))


class PipeLink(asyncio.Protocol):
    """To an engine in another process, over a socket that both inherited. on_end: the other end is closed."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.receive: Callable[[Sequence[Message]], None] = lambda messages: None
        self._on_end = on_end
        self._unframer = Unframer()
        self._transport: asyncio.Transport | None = None

    async def open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.receive(list(self._unframer.feed(data)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def send(self, message: Message) -> None:
        assert self._transport is not None, "the link is open before anything is sent"
        self._transport.write(framed(message))
