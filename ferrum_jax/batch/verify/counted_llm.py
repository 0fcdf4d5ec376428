"""An engine whose answers are counted as they come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, cast

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.core.outputs import RequestOutput


def counted(llm: BatchLLM, tell: Callable[[int], None]) -> BatchLLM:
    """The engine; `tell` is told how many answers there are after each."""
    return cast("BatchLLM", _CountedLLM(llm, tell))


class _CountedLLM:
    def __init__(self, llm: BatchLLM, tell: Callable[[int], None]) -> None:
        self._llm, self._tell, self._count = llm, tell, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._llm, name)
        return (lambda *given, **how: self._counted(found(*given, **how))) if name == "run" else found

    def _counted(self, answers: Generator[tuple[int, Any], None, None]) -> Generator[tuple[int, Any], None, None]:
        try:
            for key, answer in answers:
                if not isinstance(answer, RequestOutput) or answer.finished:
                    self._count += 1
                    self._tell(self._count)
                yield key, answer
        finally:
            answers.close()
