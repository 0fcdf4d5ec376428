"""SharedEngine: one engine, and the overlapping calls of one thread that share it.

Each call has an inbox, and whoever steps the engine fills them all. A call that is broken off in the middle of a step
(Ctrl-C, an error) leaves pools that are donated and not returned: that engine is dropped, and a fresh one is made for
the next call. While requests run, other threads are refused.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import jax

from ferrum_jax.asked.options import NO_OPTIONS, RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.engine.engine import Engine
from ferrum_jax.outputs import RequestOutput
from ferrum_jax.runtime.compile import CompileCounter

T = TypeVar("T")
Inbox = deque[RequestOutput]


class SharedEngine:
    """The calls that run on one engine."""

    def __init__(
        self, engine: Engine, make: Callable[[], Engine], *, counter: CompileCounter, on_recompile: str
    ) -> None:
        """make: a fresh engine with empty caches, after `engine` was dropped. on_recompile: see EngineConfig."""
        self._make = make
        self._engine: Engine | None = engine
        self._inboxes: dict[int, Inbox] = {}  # by unfinished submission
        self._counter = counter
        self._on_recompile = on_recompile
        self._owner: int | None = None  # thread whose requests run
        self._inside = threading.RLock()  # a stream that is collected in the middle of a call ends in its thread
        self.asleep: tuple[str, ...] = ()  # of weights and KV, what is not on the devices
        self.num_compiles = 0  # of steps, which call executables and compile nothing

    @property
    def engine(self) -> Engine:
        """The engine; a fresh one with empty caches after one was dropped. Raises ValueError while it sleeps."""
        if self.asleep:
            raise ValueError(f"{' and '.join(self.asleep)} sleep, so nothing runs; call wake_up() first")
        if self._engine is None:
            self._engine = self._make()
        return self._engine

    @property
    def busy(self) -> bool:
        return self._engine is not None and self._engine.has_unfinished

    def add(
        self, inbox: Inbox, token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions = NO_OPTIONS
    ) -> int:
        """Queues a prompt whose outputs go to `inbox`; the submission's id."""
        with self._owned():
            try:
                submission = self.engine.add(token_ids, sampling, options)
            except ValueError:  # refused, with nothing left behind
                raise
            except BaseException:
                self.drop()
                raise
            self._inboxes[submission] = inbox
            return submission

    def receive(self, inbox: Inbox) -> RequestOutput:
        """The next output for `inbox`; steps until there is one."""
        while not inbox:
            self.step()
        return inbox.popleft()

    def step(self) -> None:
        """One step of the engine; what it gives goes into the inboxes."""
        with self._owned():
            if not self.engine.has_unfinished:
                raise RuntimeError("the engine was broken off in another call; ask again")
            self._deliver(self.whole(self._counted_step))

    def quiet(self, requests: str) -> None:
        """Lets the device come to rest; what it has done is in the inboxes.

        requests: "abort" ends all that runs or waits, "wait" lets it end, "keep" keeps it.
        """
        while requests == "wait" and self.busy:
            self.step()
        if self._engine is not None:
            with self._owned():
                self._deliver(self.whole(self.engine.abort_all if requests == "abort" else self.engine.settle))

    def fall_asleep(self, tags: Iterable[str]) -> None:
        """Drops the engine; there is none until all of these are awake."""
        self.drop()
        self.asleep = tuple(tags)

    def wake_up(self, tags: Collection[str]) -> None:
        """These are on the devices again."""
        self.asleep = tuple(tag for tag in self.asleep if tag not in tags)

    def renew(self, weights: tuple[jax.Array, ...], fingerprint: bytes, version: int) -> None:
        """The engine goes on with other weights; nothing may be in flight."""
        if self._engine is not None:
            with self._owned():
                self.whole(lambda: self.engine.renew(weights, fingerprint, version))

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            get = self._inboxes.pop if output.finished else self._inboxes.__getitem__
            get(output.request_id).append(output)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """The engine for this thread's use. Raises RuntimeError while requests of another one run."""
        me = threading.get_ident()
        if self._owner in (None, me):
            with self._inside:
                if self._owner in (None, me):
                    self._owner = me
                    try:
                        yield
                    finally:
                        self._release()
                    return
        raise RuntimeError(
            "requests of another thread are running, and one LLM serves one thread: let one thread make all calls, and "
            "hand it the requests of the others"
        )

    def _release(self) -> None:
        if not self._inboxes:
            self._owner = None

    def _counted_step(self) -> list[RequestOutput]:
        before = self._counter.count_here()
        outputs = self.engine.step()
        compiled = self._counter.count_here() - before
        if compiled:
            self.num_compiles += compiled
            text = (
                f"a step compiled {compiled} program(s), though the engine was ready: this is a fault, please report it"
            )
            if self._on_recompile == "error":
                raise RuntimeError(f"{text}; on_recompile='warn' goes on all the same")
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return outputs

    def abort(self, submission: int) -> None:
        """Ends one submission before its time; nothing where it has ended."""
        with self._owned():
            if self._inboxes.pop(submission, None) is not None:
                self.engine.abort(submission)

    def end(self, inbox: Inbox) -> None:
        """Ends what is unfinished of an inbox; waits for the device if nothing else runs."""
        with self._inside:
            for submission in [i for i, box in self._inboxes.items() if box is inbox]:
                del self._inboxes[submission]
                self.engine.abort(submission)
            if self._engine is not None and not self._engine.has_unfinished:
                self.whole(self._engine.drain)
            self._release()

    def whole(self, call: Callable[[], T]) -> T:
        """The result of a call into the engine. One that is broken off ends everything that runs."""
        try:
            return call()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Drops the engine and everything that runs: its books may differ from the device."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._inboxes.clear()
