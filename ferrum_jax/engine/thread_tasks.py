"""ThreadTasks: tasks whose requests run on an engine's thread, for who waits elsewhere.

ticket = TaskTicket(answered)         one task; who asks makes it
begin(ticket, task)  leave(ticket)    from any thread
answered(parts or error)              once, on the engine's thread; `finished` makes the answer of the parts
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ferrum_jax.core.outputs import ABORTED
from ferrum_jax.engine.engine_thread import Aborted, EngineThread, Ticket
from ferrum_jax.engine.engine_thread import Answer as FromThread
from ferrum_jax.tasks.task import Answer, EngineRequest, RunningRequest, RunningTask, RunningTasks, Task
from ferrum_jax.text.output_processor.collect import Collected, Collector

Parts = Sequence[Collected]  # what came of each request of a task


class TaskTicket:
    """One task. answered: takes what its requests gave, or the error that ended it."""

    __slots__ = ("answered", "has_left", "running")

    def __init__(self, answered: Callable[[Parts | Exception], None]) -> None:
        self.answered = answered
        self.running: RunningTask | None = None
        self.has_left = False


def finished(task: Task[Answer], parts: Parts | Exception) -> Answer:
    """The task's answer. Raises the error that ended it, Aborted if a request was cut, and what `finish` raises."""
    if isinstance(parts, Exception):
        raise parts
    return task.finish([part.output() for part in parts])


class ThreadTasks:
    """The tasks of one thread; a request that a task shares with the one begun before it runs once."""

    def __init__(self, thread: EngineThread, collector: Callable[[], Collector], *, waits: bool = False) -> None:
        """collector: the engine's at that time. waits: as a `Ticket` has it."""
        self._thread, self._collector, self._waits = thread, collector, waits
        self._lock = threading.Lock()
        self._runs: RunningTasks[TaskTicket, Any] = RunningTasks((), self._abort)
        self._tickets: dict[RunningRequest, Ticket] = {}
        self._requests: dict[Ticket, tuple[RunningRequest, Collected]] = {}

    def begin(self, ticket: TaskTicket, task: Task[Any]) -> None:
        """Has the task's requests run, unless its asker has left."""
        with self._lock:
            if ticket.has_left:
                return
            ticket.running, requests = self._runs.begin(ticket, dataclasses.replace(task, finish=list, partial=None))
            for request in requests:
                inner = Ticket(self._take, waits=self._waits)
                collected = self._collector().collected(*request.request)
                request.output = lambda collected=collected: collected  # type: ignore[assignment,misc]
                self._tickets[request], self._requests[inner] = inner, (request, collected)
                self._thread.add(inner, *request.request)
        self._tell()

    def leave(self, ticket: TaskTicket) -> None:
        """Nobody waits for the task any more: requests that no other task has end before the next step."""
        with self._lock:
            ticket.has_left = True
            if ticket.running is not None and not ticket.running.is_over:
                self._runs.cancel(ticket.running)

    def _abort(self, request: RunningRequest) -> None:
        inner = self._tickets.pop(request)
        del self._requests[inner]
        self._thread.abort(inner)

    def _take(self, answers: Sequence[tuple[Ticket, FromThread]]) -> None:
        """The deltas of one step, on the engine's thread."""
        with self._lock:
            for inner, answer in answers:
                if inner not in self._requests:  # its asker has left
                    continue
                request, collected = self._requests[inner]
                error = answer if isinstance(answer, Exception) else None
                if not isinstance(answer, Exception):
                    collected.take(answer)
                    error = Aborted(ABORTED) if answer.finish_reason == "abort" else None
                    if not collected.has_ended:
                        continue
                del self._requests[inner], self._tickets[request]
                if error is None:
                    self._runs.end(request)
                else:
                    self._runs.refuse(request, error)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            answers = list(self._runs.answers())
        for ticket, parts in answers:
            if ticket.running and _mixes_weights(parts):  # the query's vector is of those before
                self.begin(ticket, Task([EngineRequest(*each) for each in ticket.running.task.requests], list))
            else:
                ticket.answered(parts)


def _mixes_weights(parts: Parts | Exception) -> bool:
    """Whether texts that are compared were read with several versions of the weights."""
    found = () if isinstance(parts, Exception) else [part.choices[0].beside for part in parts]
    return len({each.weights_version for each in found if each.embedding is not None}) > 1
