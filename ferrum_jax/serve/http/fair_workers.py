"""FairWorkers: threads for work that may take long, so that the event loop and other kinds of work never wait for it.

Who waits has turns between keys, as at the gate. Work that nobody waits for any more is not begun, and what runs for
them ends at its next look.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ferrum_jax.inputs.images.decoding import Look, Stopped
from ferrum_jax.serve.http.fair_queue import FairQueue, QueueEntry

Result = TypeVar("Result")


class _WorkAsked(QueueEntry):
    def __init__(self, work: Callable[[Look], Any], **turn: Any) -> None:
        super().__init__(**turn)
        self.work, self.has_left = work, threading.Event()
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class FairWorkers:
    """Workers of one event loop. may_begin: whether there is room for more results; asked before each task."""

    def __init__(self, name: str, num_threads: int, *, may_begin: Callable[[], bool] = lambda: True) -> None:
        self._queue: FairQueue[_WorkAsked] = FairQueue(max_requests=sys.maxsize, max_tokens=sys.maxsize)
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix=f"ferrum-{name}")
        self._num_free = num_threads
        self._may_begin = may_begin

    async def call(self, work: Callable[[Look], Result], *, key: str, cost: int) -> Result:
        """What work(look) returns or raises. Cancelling it takes the work back. cost: beside that of others."""
        asked = _WorkAsked(work, key=key, cost=cost)
        self._queue.push([asked])
        self.pump()
        try:
            return await asked.answer
        finally:
            asked.has_left.set()
            if asked.is_queued:
                self._queue.remove(asked)

    def pump(self) -> None:
        """Begins what there is room for."""
        while self._num_free and self._may_begin() and (asked := self._queue.pop()) is not None:
            self._num_free -= 1
            running = asyncio.get_running_loop().run_in_executor(self._pool, _run, asked)
            running.add_done_callback(lambda done, asked=asked: self._end(done, asked))

    def _end(self, done: asyncio.Future[Any], asked: _WorkAsked) -> None:
        self._num_free += 1
        error = None if done.cancelled() else done.exception()
        if asked.answer.done():  # who asked has left
            pass
        elif error is not None:
            asked.answer.set_exception(error)
        elif not done.cancelled():
            asked.answer.set_result(done.result())
        self.pump()


def _run(asked: _WorkAsked) -> Any:
    def look() -> None:
        if asked.has_left.is_set():
            raise Stopped

    look()
    return asked.work(look)
