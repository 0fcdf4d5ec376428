"""Gate: who may hand a request to the engine, and when.

The engine gets a quarter more rows than it runs at once, so that it never waits for HTTP; all others wait here, in a
queue that is fair between keys. A full queue refuses with the seconds after which to ask again: the tokens that wait,
over those that ended per second in the last while.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ferrum_jax.serve.http.fair_queue import FairQueue, QueueEntry
from ferrum_jax.serve.link.engine_client import EngineLost, Reply

_WHILE_S = 20.0  # over which speed is measured
_LEAST_S, _MOST_S = 1, 60


class QueueFull(RuntimeError):
    """No room for more requests now. retry_after_s: whole seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Waiting(QueueEntry):
    """A request from its arrival until it ends. begun: its reply, once the engine has it. held_bytes: of its images."""

    def __init__(self, begin: Callable[[], Reply], held_bytes: int = 0, **turn: Any) -> None:
        """turn: of `QueueEntry`."""
        super().__init__(**turn)
        self.begin, self.held_bytes = begin, held_bytes
        self.begun: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.arrived = time.monotonic()
        self.queue_s = 0.0  # how long it waited here


class Gate:
    """num_rows: of the engine. on_begin: told of each request that reaches it."""

    def __init__(self, queue: FairQueue[Waiting], *, on_begin: Callable[[Waiting], None] = lambda _: None) -> None:
        self.num_rows = 1
        self._queue = queue
        self._on_begin = on_begin
        self._rows_begun = 0
        self._ended: deque[tuple[float, int]] = deque()  # when, tokens

    @property
    def num_waiting(self) -> int:
        return self._queue.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    def enter(self, requests: Sequence[Waiting]) -> None:
        """Queues all of them. Raises QueueFull with none queued."""
        if not self._queue.push(requests):
            wait = self.retry_after_s()
            raise QueueFull(
                f"{self.num_waiting} requests of {self.num_waiting_tokens:,} tokens wait; ask again in {wait} s", wait
            )
        self.pump()

    def leave(self, request: Waiting) -> None:
        """Who asked has left before the engine had it."""
        if request.is_queued:
            self._queue.remove(request)
            request.begun.cancel()

    def pump(self) -> None:
        """Hands over what there is room for."""
        most = self.num_rows + max(1, self.num_rows // 4)
        while self._rows_begun < most and (request := self._queue.pop()) is not None:
            if not request.begun.cancelled():  # who asked may have left in this moment
                self._begin(request)

    def _begin(self, request: Waiting) -> None:
        request.queue_s = time.monotonic() - request.arrived
        try:
            reply = request.begin()
        except EngineLost as error:
            request.begun.set_exception(error)
            return
        self._rows_begun += request.rows
        reply.on_end = lambda: self._end(request)
        self._on_begin(request)
        request.begun.set_result(reply)

    def _end(self, request: Waiting) -> None:
        self._rows_begun -= request.rows
        self._ended.append((time.monotonic(), request.cost))
        self._forget_old()
        self.pump()

    def _forget_old(self) -> None:
        while self._ended and self._ended[0][0] < time.monotonic() - _WHILE_S:
            self._ended.popleft()

    def retry_after_s(self) -> int:
        """When what waits now should have ended."""
        self._forget_old()
        if not self._ended:
            return _MOST_S if self.num_waiting_tokens else _LEAST_S
        seconds = max(1.0, time.monotonic() - self._ended[0][0])
        speed = sum(tokens for _, tokens in self._ended) / seconds
        return min(_MOST_S, max(_LEAST_S, math.ceil(self.num_waiting_tokens / max(speed, 1e-9))))
