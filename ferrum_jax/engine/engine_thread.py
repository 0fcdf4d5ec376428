"""EngineThread: an engine on a thread of its own. Commands go in by a queue, deltas come out by calls of sinks.

    add(ticket, ..)  abort(ticket)  call(function)  pause(requests)  resume()      from any thread, at once
    sink([(ticket, delta or error), ..])                on this thread, at most once a step for each sink

A ticket is one request: who asks makes it and knows by it what comes back. What is added or aborted while a step runs
is heeded before the next. A step that fails ends what ran, each with EngineFailed, and a fresh engine goes on; after
MOST_FAILURES in a row, with no step between them that went well, nothing more runs, and `failed` says why.
While it is paused, what is added waits until it resumes; while it sleeps, tickets wait that say so.
"""

import concurrent.futures
import contextlib
import functools
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.shared import WHAT_BECOMES, Inbox, SharedEngine
from ferrum_jax.io.watched_threads import start_thread
from ferrum_jax.sampling_params import SamplingParams

MOST_FAILURES = 3
Answer = Delta | Exception


class EngineFailed(RuntimeError):
    """A step failed, and with it the requests that ran. is_final: the engine has ended."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Aborted(EngineFailed):
    """Who owns the engine ended the request."""


class Ticket:
    """One request at an engine thread. sink: takes what becomes of it, with others' of the same sink.

    waits: it is not refused while the engine sleeps.
    """

    __slots__ = ("sink", "submission", "waits")

    def __init__(self, sink: Callable[[Sequence[tuple[Any, Answer]]], None], *, waits: bool = False) -> None:
        self.sink, self.waits = sink, waits
        self.submission: int | None = None  # while it runs


class _NewRequest(NamedTuple):
    ticket: Ticket
    token_ids: Sequence[int]
    sampling: SamplingParams
    options: RequestOptions


class _Leaving(NamedTuple):
    ticket: Ticket


class _Errand(NamedTuple):
    function: Callable[[], Any]
    future: concurrent.futures.Future[Any]


class _Pause(NamedTuple):
    """requests: of WHAT_BECOMES. futures: of those who wait until nothing runs."""

    requests: str
    futures: list[concurrent.futures.Future[Any]]


class EngineThread:
    """num_steps, last_step: how many steps ended well, and when the last one did or the engine had nothing to do.

    after_errands: called on the thread after each `call`, as one may change the weights.
    """

    def __init__(self, calls: SharedEngine) -> None:
        self.num_steps, self.last_step = 0, time.monotonic()
        self.after_errands: list[Callable[[], None]] = []
        self._calls = calls
        self._commands: queue.SimpleQueue[_NewRequest | _Leaving | _Errand | None] = queue.SimpleQueue()
        self._inbox: Inbox = deque()
        self._tickets: dict[int, Ticket] = {}
        self._pause: _Pause | None = None
        self._held: list[_NewRequest] = []  # while it is paused or sleeps
        self._failures = 0
        self._failed: EngineFailed | None = None
        self._thread = start_thread(self._run, self._give_up, name="ferrum-engine")

    @property
    def num_open(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._tickets) + len(self._held)

    @property
    def is_paused(self) -> bool:
        return self._pause is not None

    @property
    def failed(self) -> EngineFailed | None:
        """Why nothing runs any more; None while it does, and after `close`."""
        return self._failed

    @property
    def silence_s(self) -> float:
        """For how long requests have waited for a step, or commands for one before them; 0 while none do."""
        return 0.0 if not self._runs and self._commands.empty() else time.monotonic() - self.last_step

    # -- from any thread -------------------------------------------------------------------------------

    def add(self, ticket: Ticket, token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions) -> None:
        """Has the request run; what is wrong with it goes to its sink as a ValueError."""
        self._commands.put(_NewRequest(ticket, token_ids, sampling, options))

    def abort(self, ticket: Ticket) -> None:
        """Ends the request before the next step; its sink hears nothing more of it."""
        self._commands.put(_Leaving(ticket))

    def call(self, function: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        """The result of a function, called on the thread between two steps."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._commands.put(_Errand(function, future))
        return future

    def pause(self, requests: str) -> concurrent.futures.Future[None]:
        """Done once nothing runs; what is added from then on waits for `resume`.

        requests: "abort" ends those that run, "wait" lets them end first, "keep" has them go on later where they were.
        Raises ValueError for another word.
        """
        if requests not in WHAT_BECOMES:
            raise ValueError(f"requests is {requests!r}; it must be one of {WHAT_BECOMES}")
        paused: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.call(lambda: self._begin_pause(requests, paused)).add_done_callback(functools.partial(_pass_on, paused))
        return paused

    def resume(self) -> concurrent.futures.Future[None]:
        """Has it go on, with what waits; nothing where it is not paused."""
        return self.call(self._end_pause)

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends what runs, and the thread."""
        self._commands.put(None)
        self._thread.join(timeout_s)

    # -- on the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._goes_on():
            pass

    def _give_up(self, why: str) -> None:
        self._failed = EngineFailed(why, is_final=True)

    def _goes_on(self) -> bool:
        """One turn. What fails outside of the engine, as a sink might, is final: others must not wait for ever.

        So is what is no Exception, as a panic of a library in Rust.
        """
        try:
            if not self._take_commands():
                return False
            if self._runs:
                self._step()
            if self._pause is not None and not self._runs:
                for paused in self._pause.futures:
                    paused.set_result(None)
                self._pause.futures.clear()
        except BaseException as error:
            self._failed = EngineFailed(f"the engine's thread failed: {_words(error)}", is_final=True)
            self._failed.__cause__ = error
            with contextlib.suppress(BaseException):  # those who wait hear of it whatever the engine has come to
                self._calls.drop()
            self._end(self._failed)
        return True

    def _take_commands(self) -> bool:
        """Does all that is asked so far, and waits for something where nothing runs; False when it is to end."""
        commands = [] if self._runs else [self._commands.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                commands.append(self._commands.get_nowait())
        if not self._runs:
            self.last_step = time.monotonic()
        for command in commands:
            if command is None:
                self._end(EngineFailed("the engine was closed", is_final=True))
                return False
            self._do(command)
        return True

    def _do(self, command: _NewRequest | _Leaving | _Errand) -> None:
        if isinstance(command, _NewRequest):
            self._begin(command)
        elif isinstance(command, _Leaving):
            self._guarded(lambda: self._drop(command.ticket))
        elif command.future.set_running_or_notify_cancel():
            try:
                found = command.function()
                for tell in list(self.after_errands):
                    tell()
                command.future.set_result(found)
            except BaseException as error:  # it is the caller's
                command.future.set_exception(error)
            held, self._held = self._held, []
            for each in held:
                self._begin(each)

    @property
    def _runs(self) -> bool:
        """Whether there is a step to do."""
        return bool(self._tickets) and (self._pause is None or self._pause.requests != "keep")

    def _begin_pause(self, requests: str, paused: concurrent.futures.Future[None]) -> None:
        if requests == "abort" and self._tickets:
            self._guarded(lambda: self._calls.quiet("abort"))
        self._pause = _Pause(requests, [*(self._pause.futures if self._pause else ()), paused])

    def _end_pause(self) -> None:
        if self._pause is not None:
            for paused in self._pause.futures:
                paused.set_exception(ValueError("it was resumed before all that ran had ended"))
        self._pause = None

    def _begin(self, command: _NewRequest) -> None:
        ticket = command.ticket
        if self._failed is not None:
            ticket.sink([(ticket, self._failed)])
            return
        if self._pause is not None or (ticket.waits and self._calls.asleep):
            self._held.append(command)
            return
        try:
            submission = self._calls.add(self._inbox, command.token_ids, command.sampling, command.options)
        except ValueError as error:
            ticket.sink([(ticket, error)])
            return
        except Exception as error:
            ticket.sink([(ticket, EngineFailed(_words(error)))])
            self._fail(error)
            return
        ticket.submission = submission
        self._tickets[submission] = ticket

    def _drop(self, ticket: Ticket) -> None:
        self._held = [each for each in self._held if each.ticket is not ticket]
        if ticket.submission in self._tickets:
            self._calls.abort(ticket.submission)
            self._tickets.pop(ticket.submission, None)
            self._rest()

    def _step(self) -> None:
        if not self._inbox:  # a call that stepped the engine may have filled it
            if not self._guarded(self._calls.step):
                return
            self.num_steps += 1
            self.last_step, self._failures = time.monotonic(), 0
        answers: dict[Any, list[tuple[Ticket, Answer]]] = {}
        while self._inbox:
            delta = self._inbox.popleft()
            ticket = self._tickets[delta.id]
            if delta.is_last:
                del self._tickets[delta.id]
            answers.setdefault(ticket.sink, []).append((ticket, delta))
        for sink, found in answers.items():
            sink(found)
        self._guarded(self._rest)

    def _rest(self) -> None:
        """Takes the last step's results off the device where nothing runs any more."""
        if not self._tickets:
            self._calls.end(self._inbox)

    def _guarded(self, call: Callable[[], None]) -> bool:
        """Whether a call into the engine went well."""
        try:
            call()
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """What ran has ended with the engine that ran it."""
        self._failures += 1
        failed = EngineFailed(f"the engine failed in a step: {_words(error)}")
        failed.__cause__ = error
        if self._failures >= MOST_FAILURES:
            failed.is_final, self._failed = True, failed
        self._calls.drop()
        self._end(failed)

    def _end(self, failed: EngineFailed) -> None:
        """Every request ends with this error, and the engine holds nothing of them."""
        held = [each.ticket for each in self._held] if failed.is_final else []
        tickets, self._tickets = [*self._tickets.values(), *held], {}
        self._inbox.clear()
        if failed.is_final:
            self._held.clear()
            for paused in self._pause.futures if self._pause else ():
                paused.set_exception(failed)
        if tickets:
            with contextlib.suppress(*(BaseException,) * failed.is_final):
                self._calls.end(self._inbox)
        for ticket in tickets:
            with contextlib.suppress(BaseException):  # a sink that fails keeps no other from hearing it
                ticket.sink([(ticket, failed)])


def _pass_on(paused: concurrent.futures.Future[None], begun: concurrent.futures.Future[None]) -> None:
    """Why a pause could not begin, to who waits for it."""
    error = begun.exception()
    if error is not None:
        paused.set_exception(error)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
