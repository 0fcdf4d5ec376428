"""What a job asks of an engine."""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.heard_sound import HeardSound


class RowCrash(ValueError):
    """An engine that runs elsewhere crashed with this row, twice, the second time with it alone."""


class RowAborted(ValueError):
    """Who owns the engine ended all that ran, as a pause may: no row is to blame, and each runs again."""


class RowRequest(NamedTuple):
    """One prompt, text or pair of a row, as data that may travel to another machine.

    key: of its answer. kind: as of `Row`. resume: the choices that it goes on from.
    """

    key: int
    kind: int
    content: Any
    params: SamplingParams
    resume: tuple[CompletionOutput, ...] = ()


def run_rows(
    llm: BatchLLM,
    requests: Iterable[RowRequest],
    *,
    now: datetime.datetime,
    wants_partials: Callable[[], bool] = lambda: False,
    most_running: Callable[[], float] = lambda: math.inf,
) -> Generator[tuple[int, Any], None, None]:
    """(key, answer or ValueError) of each request as it comes. now: the time of day that chat templates see."""
    make = llm.row_tasks(now)
    tasks = ((request.key, functools.partial(make, request)) for request in requests)
    return llm.run(tasks, wants_partials=wants_partials, most_running=most_running)


class BatchLLM(Protocol):
    """What a job asks of an engine: `ferrum_jax.LLM`, or a fake one in tests.

    Closing the generator aborts the unfinished requests.
    """

    @property
    def identity(self) -> ModelIdentity | None:
        """What answers; None where that is known only with the first answers."""
        ...

    def row_tasks(self, now: datetime.datetime) -> Callable[[RowRequest], Any]:
        """Makes what `run` takes of a row's requests; raises ValueError for one that cannot be served.

        now: the time of day that chat templates see.
        """
        ...

    def run(
        self,
        tasks: Iterable[tuple[int, Callable[[], Any]]],
        *,
        wants_partials: Callable[[], bool],
        most_running: Callable[[], float],
    ) -> Generator[tuple[int, Any], None, None]:
        """(key, answer or ValueError) of each task, as of `LLM.run`; whatever it generates also so far."""
        ...

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        """A sound that a row names, read. Any thread may ask."""
        ...

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None: ...

    def progress(self) -> Mapping[str, tuple[float, float, float]]:
        """As of `LLM.progress`; empty where that is not known."""
        ...

    def stats(self) -> dict[str, Any]: ...
