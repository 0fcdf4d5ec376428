"""Task: what a user asks for, as requests to an engine and the answer that their outputs become.

    task = Task(requests, finish)         made by `TaskMaker`, which knows the model; nothing has run
    outputs                               one RequestOutput for each request, whatever ran beside it
    answer = task.finish(outputs)         the same answer at every door: LLM, AsyncLLM, HTTP, rows of a job

A door has one verb, `run(tasks)`. `RunningTasks` is the one place that gathers the outputs of several requests.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ferrum_jax.core.outputs import ABORTED, RequestOutput
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.output_processor.collect import failure_of

Key = TypeVar("Key")
Answer = TypeVar("Answer")
NOT_BEGUN = RequestOutput(
    request_id=0, prompt=None, prompt_token_ids=(), outputs=(), num_cached_tokens=0, finished=False
)
# Computes a prompt, whose last state is a text's vector; the token that is drawn is of no use, and has no text.
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


class EngineRequest(NamedTuple):
    """One prompt as an engine takes it."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    options: RequestOptions


@dataclass(frozen=True)
class Task(Generic[Answer]):
    """Requests that run side by side, and one answer.

    finish: the answer, from the finished outputs in the order of `requests`; raises ValueError if there is none.
    partial: the answer so far, for streams and journals; a request that has not begun has an output without choices.

    A request that a task shares with the task before it, as the same object, runs once for both.
    """

    requests: Sequence[EngineRequest]
    finish: Callable[[Sequence[RequestOutput]], Answer]
    partial: Callable[[Sequence[RequestOutput]], Answer] | None = None


MakeTask = Callable[[], Task[Answer]]  # raises ValueError for what cannot be served


def succeeded(output: RequestOutput) -> RequestOutput:
    """The output. Raises ValueError if one of its choices could not go on."""
    if (failure := failure_of(output)) is not None:
        raise failure
    return output


def vector_in(output: RequestOutput) -> np.ndarray:
    """[D] float32: the pooled state, or an encoder's logits. Raises ValueError if the request failed or was aborted."""
    if succeeded(output).embedding is None:
        raise ValueError(ABORTED)
    return output.embedding  # type: ignore[return-value]


def completion(request: EngineRequest, *, fails: bool = False) -> Task[RequestOutput]:
    """A prompt that goes on. fails: a choice that could not go on refuses it; else its finish_reason is "error"."""
    finish = _succeeded if fails else _only
    return Task([request], finish, finish)


def _only(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return outputs[0]


def _succeeded(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return succeeded(outputs[0])


def generates_nothing(name: str, why: str) -> str:
    """The refusal of a request for text by a model that has none. name: of its architecture."""
    return (
        f"{name} {why} and generates nothing; ask it for vectors: LLM.embed, `ferrum-jax embed`, "
        "/v1/embeddings, or rows of a batch with `input`"
    )


class RunningRequest:
    """A request in flight. output: gives its output so far; whoever begins the request sets it."""

    __slots__ = ("error", "has_ended", "output", "request", "tasks")

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.output: Callable[[], RequestOutput] = lambda: NOT_BEGUN
        self.tasks: list[RunningTask] = []  # several if they share it
        self.has_ended = False
        self.error: Exception | None = None  # why the engine refused it

    @property
    def has_partials(self) -> bool:
        """Whether a task wants to know how far it is."""
        return any(each.task.partial for each in self.tasks)

    @property
    def may_be_shared(self) -> bool:
        """Whether another task may wait for it too, or have what it gave."""
        return bool(self.tasks) or (self.has_ended and (self.error is None or isinstance(self.error, ValueError)))


class RunningTask:
    """A task in flight. num_left: requests that have not ended. is_over: it was answered, or nobody waits for it."""

    __slots__ = ("is_over", "key", "num_left", "parts", "task")

    def __init__(self, key: Any, task: Task, parts: Sequence[RunningRequest]) -> None:
        self.key, self.task, self.parts = key, task, parts
        self.num_left = sum(not part.has_ended for part in parts)
        self.is_over = False

    def outputs(self) -> list[RequestOutput]:
        return [part.output() for part in self.parts]


class RunningTasks(Generic[Key, Answer]):
    """has_more: whether `next` may still give a request.

    Requests are begun by whoever has the engine: `next` gives the next one, then `refuse` or `end` says what became
    of it, and `answers` gives what is ready. A refused request refuses its task.
    """

    def __init__(
        self,
        tasks: Iterable[tuple[Key, MakeTask[Answer]]],
        abort: Callable[[RunningRequest], None] = lambda request: None,
    ) -> None:
        """abort: called with each request in flight that no task waits for any more."""
        self.has_more = True
        self._source, self._abort = self._requests(tasks), abort
        self._open: dict[RunningTask, None] = {}
        self._answers: deque[tuple[Key, Any]] = deque()
        self._before: Sequence[RunningRequest] = ()  # requests of the task that was begun last

    def next(self) -> RunningRequest | None:
        """The next request to begin; None if a task was answered instead, or none is left."""
        try:
            return next(self._source)
        except StopIteration:
            self.has_more = False
            return None

    def answers(self) -> Iterator[tuple[Key, Answer | ValueError]]:
        """(key, answer) of each task that is over, once."""
        while self._answers:
            yield self._answers.popleft()

    def partials(self, tasks: Iterable[RunningTask] | None = None) -> Iterator[tuple[Key, Answer]]:
        """(key, answer so far) of these tasks, or of all; none of a task without partial answers."""
        for running in list(self._open if tasks is None else tasks):
            if running.task.partial is not None and not running.is_over:
                try:
                    answer = running.task.partial(running.outputs())
                except ValueError as error:
                    self._refuse(running, error)
                else:
                    yield running.key, answer

    def end(self, request: RunningRequest) -> None:
        """The request has its whole output."""
        request.has_ended = True
        for running in list(request.tasks):
            running.num_left -= 1
            if not running.num_left:
                self._finish(running)

    def refuse(self, request: RunningRequest, error: Exception) -> None:
        """The engine does not take the request, or has failed with it."""
        request.has_ended, request.error = True, error
        for running in list(request.tasks):
            self._refuse(running, error)

    def close(self) -> None:
        """Reads no further tasks."""
        self._source.close()

    def _requests(self, tasks: Iterable[tuple[Key, MakeTask[Answer]]]) -> Generator[RunningRequest | None, None, None]:
        for key, make in tasks:
            try:
                running, new = self.begin(key, make())
            except ValueError as error:
                self._answers.append((key, error))
                yield None
                continue
            if running.is_over:
                yield None
            for request in new:
                if not running.is_over:
                    yield request

    def begin(self, key: Key, task: Task[Answer]) -> tuple[RunningTask, list[RunningRequest]]:
        """The task, and those of its requests that do not run yet: none if a shared one was refused, and with it this.

        For callers that have tasks one by one; `next` does it with those of an iterable. A request with which the
        engine failed is not shared.
        """
        shared = {id(part.request): part for part in self._before if part.may_be_shared}
        parts = [shared.get(id(request)) or RunningRequest(request) for request in task.requests]
        running = RunningTask(key, task, parts)
        self._open[running] = None
        for part in parts:
            part.tasks.append(running)
        error = next((part.error for part in parts if part.error is not None), None)
        if error is not None:
            self._close(running, error)
            return running, []
        self._before = parts
        if not running.num_left:
            self._finish(running)
        return running, [part for part in parts if id(part.request) not in shared]

    def cancel(self, running: RunningTask) -> None:
        """Nobody waits for the task; it gives no answer."""
        self._refuse(running, None)
        self._answers.pop()

    def _finish(self, running: RunningTask) -> None:
        try:
            answer = running.task.finish(running.outputs())
        except ValueError as error:
            answer = error
        self._close(running, answer)

    def _refuse(self, running: RunningTask, error: Exception | None) -> None:
        self._close(running, error)
        for part in running.parts:
            if not (part.tasks or part.has_ended):
                self._abort(part)

    def _close(self, running: RunningTask, answer: Any) -> None:
        running.is_over = True
        del self._open[running]
        self._answers.append((running.key, answer))
        for part in running.parts:
            part.tasks.remove(running)
