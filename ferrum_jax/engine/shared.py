"""SharedEngine: one engine, and the overlapping calls of one thread that share it.

Each call has an inbox, and whoever steps the engine fills them all. A call that is broken off in the middle of a step
(Ctrl-C, an error) leaves pools that are donated and not returned: that engine is dropped, and a fresh one is made for
the next call. While requests run, other threads are refused.
"""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import NO_OPTIONS, RequestOptions
from ferrum_jax.engine.core import EngineCore
from ferrum_jax.runtime.compile.compile import CompileCounter
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import Answer, MakeTask, RunningRequest, RunningTasks
from ferrum_jax.text.output_processor.collect import Collected, Collector

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)
Inbox = deque[Delta]
_Running = dict[int, tuple[RunningRequest, Collected]]  # by submission
WHAT_BECOMES = ("abort", "wait", "keep")  # of requests that run while weights are updated, or while it pauses


class SharedEngine:
    """The calls that run on one engine."""

    def __init__(
        self,
        engine: EngineCore,
        make: Callable[[], EngineCore],
        *,
        collector: Collector,
        counter: CompileCounter,
        on_recompile: str,
    ) -> None:
        """make: a fresh engine with empty caches, after `engine` was dropped. on_recompile: see EngineConfig."""
        self.collector = collector
        self._make = make
        self._engine: EngineCore | None = engine
        self._inboxes: dict[int, Inbox] = {}  # by unfinished submission
        self._counter = counter
        self._on_recompile = on_recompile
        self._owner: int | None = None  # thread whose requests run
        self._inside = threading.RLock()  # a stream that is collected in the middle of a call ends in its thread
        self.asleep: tuple[str, ...] = ()  # of weights and KV, what is not on the devices
        self.num_compiles = 0  # of steps, which call executables and compile nothing

    @property
    def engine(self) -> EngineCore:
        """The engine; a fresh one with empty caches after one was dropped. Raises ValueError while it sleeps."""
        if self.asleep:
            raise ValueError(f"{' and '.join(self.asleep)} sleep, so nothing runs; call wake_up() first")
        engine = self._engine
        if engine is None:
            with self._inside:  # of two threads that ask at once, one makes it
                engine = self._engine = self._engine or self._make()
        return engine

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

    def run(
        self,
        tasks: Iterable[tuple[Key, MakeTask[Answer]]],
        *,
        room: Callable[[], float] | None = None,
        wants_partials: Callable[[], bool] = lambda: False,
    ) -> Generator[tuple[Key, Answer | ValueError], None, None]:
        """(key, answer) of each task when its requests have ended, or its partial answer whenever a streamed one grows.

        A refused task gives its ValueError. room: `tasks` is read as long as fewer requests run or wait, one at least.
        None reads all, and waits for their grammars, before a step.
        wants_partials: asked before every step; True gives the partial answers of all that run.
        """
        inbox, waits_for_grammars = Inbox(), room is None
        running: _Running = {}
        runs = RunningTasks(tasks, lambda request: self._abort(request, running))
        try:
            while runs.has_more or running:
                while runs.has_more and (room is None or len(running) < room()):
                    if (request := runs.next()) is not None:
                        self._begin(inbox, runs, request, running)
                    yield from runs.answers()
                if waits_for_grammars:
                    waits_for_grammars = False
                    self._refuse_faulty(runs, running)
                shows_all = wants_partials()
                if not (inbox or shows_all) and running:
                    self.step()
                yield from _answers(inbox, runs, running)
                if shows_all:
                    self._peek(running)
                    yield from runs.partials()
                yield from runs.answers()
        finally:
            runs.close()
            self.end(inbox)

    def _begin(self, inbox: Inbox, runs: RunningTasks, request: RunningRequest, running: _Running) -> None:
        token_ids, sampling, options = request.request
        try:
            submission = self.add(inbox, token_ids, sampling, options)
        except ValueError as error:
            runs.refuse(request, error)
            return
        collected = self.collector.collected(token_ids, sampling, options)
        request.output = collected.output
        running[submission] = request, collected

    def _abort(self, request: RunningRequest, running: _Running) -> None:
        """Ends a request that no task waits for, if it has begun."""
        for submission in [each for each, (other, _) in running.items() if other is request]:
            del running[submission]
            self.abort(submission)

    def _refuse_faulty(self, runs: RunningTasks, running: _Running) -> None:
        """Refuses requests whose grammars cannot be used; waits for these."""
        for submission, (request, _) in list(running.items()):
            try:
                if submission in running:
                    self.engine.require_grammar(submission)
            except ValueError as error:
                self._abort(request, running)
                runs.refuse(request, error)

    def _peek(self, running: _Running) -> None:
        """Takes what the engine has so far of requests whose tasks have partial answers."""
        for submission, (request, collected) in running.items():
            if request.has_partials:
                for delta in self.engine.peek(submission):
                    collected.take(delta)

    def step(self) -> None:
        """One step of the engine; what it gives goes into the inboxes."""
        with self._owned():
            if not self.engine.has_unfinished:
                raise RuntimeError("the engine was broken off in another call; ask again")
            self._deliver(self.whole(self._counted_step))

    def learn(self, token_ids: Sequence[int], cache_salt: str) -> None:
        """Takes a text that ended elsewhere, from which tokens may be drafted."""
        with self._owned():
            self.engine.learn(token_ids, 0, cache_salt)

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

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            get = self._inboxes.pop if delta.is_last else self._inboxes.__getitem__
            get(delta.id).append(delta)

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

    def _counted_step(self) -> list[Delta]:
        before = self._counter.count_here()
        deltas = self.engine.step()
        compiled = self._counter.count_here() - before
        if compiled:
            self.num_compiles += compiled
            text = (
                f"a step compiled {compiled} program(s), though the engine was ready: this is a fault, please report it"
            )
            if self._on_recompile == "error":
                raise RuntimeError(f"{text}; on_recompile='warn' goes on all the same")
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return deltas

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


def _answers(
    inbox: Inbox, runs: RunningTasks[Key, Answer], running: _Running
) -> Iterator[tuple[Key, Answer | ValueError]]:
    """Answers of tasks that are over, and of those whose streamed requests grow."""
    while inbox:
        delta = inbox.popleft()
        if delta.id not in running:  # aborted with its task
            continue
        request, collected = running[delta.id]
        collected.take(delta)
        if delta.is_last:
            del running[delta.id]
            runs.end(request)
            yield from runs.answers()
        elif collected.streams:
            yield from runs.partials(request.tasks)
