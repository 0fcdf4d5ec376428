"""What a job asks of an engine."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ferrum_jax.core.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Prompt
from ferrum_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.heard_sound import HeardSound


class RowCrash(ValueError):
    """An engine that runs elsewhere crashed with this row, twice, the second time with it alone."""


class RowAborted(ValueError):
    """Who owns the engine ended all that ran, as a pause may: no row is to blame, and each runs again."""


class BatchLLM(Protocol):
    """What a job asks of an engine: `ferrum_jax.LLM`, or a fake one in tests.

    Closing the generator aborts the unfinished requests. most_running: how many may run or wait together, 1 at least.

    now: the time of day that chat templates see.
    """

    @property
    def identity(self) -> ModelIdentity | None:
        """What answers; None where that is known only with the first answers."""
        ...

    def as_completed(
        self,
        requests: Iterable[tuple[int, Prompt, SamplingParams]],
        *,
        resume: Callable[[int], Sequence[CompletionOutput]],
        wants_partials: Callable[[], bool],
        most_running: Callable[[], float] = ...,
        now: datetime.datetime,
    ) -> Generator[tuple[int, RequestOutput | ValueError], None, None]: ...

    def embed_as_completed(
        self, requests: Iterable[tuple[int, Prompt]]
    ) -> Generator[tuple[int, EmbeddingOutput | ValueError], None, None]: ...

    def score_as_completed(
        self, requests: Iterable[tuple[int, Mapping[str, Any]]]
    ) -> Generator[tuple[int, ScoreOutput | ValueError], None, None]: ...

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        """A sound that a row names, read. Any thread may ask."""
        ...

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None: ...

    def progress(self) -> Mapping[str, tuple[float, float, float]]:
        """As of `LLM.progress`; empty where that is not known."""
        ...

    def stats(self) -> dict[str, Any]: ...


def begun(key: int) -> RequestOutput:
    """The output of a request that runs elsewhere, whose tokens are not known here."""
    return RequestOutput(
        request_id=key, prompt=None, prompt_token_ids=(), outputs=(), num_cached_tokens=0, finished=False
    )
