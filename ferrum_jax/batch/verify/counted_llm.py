"""An engine whose answers are counted as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.outputs import RequestOutput

if TYPE_CHECKING:
    from ferrum_jax.transcribing.heard_sound import HeardSound


class CountedLLM:
    """A BatchLLM that answers as another does. tell: told how many answers there are after each."""

    def __init__(self, llm: BatchLLM, tell: Callable[[int], None]) -> None:
        self._llm, self._tell, self._count = llm, tell, 0
        self.identity, self.stats, self.progress = llm.identity, llm.stats, llm.progress

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        return self._llm.hear(sound, params)

    def as_completed(self, requests: Iterable[Any], **how: Any) -> Generator[tuple[int, Any], None, None]:
        return self._counted(self._llm.as_completed(requests, **how))

    def embed_as_completed(self, requests: Iterable[tuple[int, Any]]) -> Generator[tuple[int, Any], None, None]:
        return self._counted(self._llm.embed_as_completed(requests))

    def score_as_completed(
        self, requests: Iterable[tuple[int, Mapping[str, Any]]]
    ) -> Generator[tuple[int, Any], None, None]:
        return self._counted(self._llm.score_as_completed(requests))

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        self._llm.learn(texts, cache_salt=cache_salt)

    def _counted(self, answers: Generator[tuple[int, Any], None, None]) -> Generator[tuple[int, Any], None, None]:
        try:
            for key, answer in answers:
                if not isinstance(answer, RequestOutput) or answer.finished:
                    self._count += 1
                    self._tell(self._count)
                yield key, answer
        finally:
            answers.close()
