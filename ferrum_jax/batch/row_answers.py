"""Answers: the prompts of a row, each a request of its own to the engine, and what has become of them.

A row is answered when all of its prompts are. Most rows have one. A request's key is one integer: the row's index plus
the prompt's place in the row times the number of rows.
"""

from collections.abc import Sequence

from ferrum_jax.batch.batch_llm import RowAborted
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.core.outputs import CompletionOutput, EmbeddingOutput, RequestOutput, ScoreOutput

Answer = RequestOutput | EmbeddingOutput | ScoreOutput | ValueError

_NOT_BEGUN = CompletionOutput(
    index=0, text="", token_ids=(), cumulative_logprob=None, logprobs=None, finish_reason=None, stop_reason=None
)


def was_aborted(answer: Answer) -> bool:
    """Whether it was cut by who owns the engine, and not by its row."""
    choices = answer.outputs if isinstance(answer, RequestOutput) else ()
    return isinstance(answer, RowAborted) or any(choice.finish_reason == "abort" for choice in choices)


class Answers:
    """The answers of one row. place: index of a prompt in the row."""

    def __init__(self, row: Row, before: Sequence[CompletionOutput]) -> None:
        """before: the choices of all prompts as they were journaled; empty for a row that has no journal entry."""
        self._row, self._before = row, tuple(before)
        self._ended: dict[int, Answer] = {}
        self._partials: dict[int, RequestOutput] = {}
        self._running: set[int] = set()
        self._heard: set[int] = set()  # those with a partial or an answer
        self._told: set[int] = set()  # those of them that reported progress since the row was last journaled

    @property
    def order(self) -> list[int]:
        """Places in the order to begin them. Prompts that had ended come last, so each start advances the others."""

        def had_ended(place: int) -> bool:
            before = self._choices_before(place)
            return bool(before) and all(choice.finish_reason is not None for choice in before)

        return sorted(range(len(self._row.prompts)), key=had_ended)

    def begin(self, place: int) -> tuple[CompletionOutput, ...]:
        """The choices from which a prompt goes on, which is about to run; none if it begins anew."""
        self._running.add(place)
        return self._choices_before(place)

    def _choices_before(self, place: int) -> tuple[CompletionOutput, ...]:
        n = self._row.asked.n
        found = self._before[place * n : (place + 1) * n]
        return found if any(choice.token_ids for choice in found) else ()

    def begins_anew(self, place: int, answer: Answer) -> bool:
        """Whether a prompt that was to go on did not, because its images are others than when it was journaled.

        True once for each prompt.
        """
        before = self._choices_before(place)
        if place in self._heard or not before or not isinstance(answer, RequestOutput):
            return False
        self._heard.add(place)
        return answer.outputs[0].image_digests != before[0].image_digests

    def put(self, place: int, answer: Answer) -> None:
        """Notes a prompt's answer, or how far it is."""
        if isinstance(answer, RequestOutput) and not answer.finished:
            self._partials[place] = answer
            self._told.add(place)
        else:
            self._ended[place] = answer
            self._running.discard(place)
            self._told.discard(place)

    @property
    def whole(self) -> list[Answer] | None:
        """The answers to all prompts, in their order; None while one is missing."""
        count = len(self._row.prompts)
        return [self._ended[place] for place in range(count)] if len(self._ended) == count else None

    def take_choices(self) -> list[CompletionOutput] | None:
        """The choices of all prompts so far, to be journaled; None until every running prompt has reported progress.

        None too where there is no token yet. A prompt that was refused or has not begun has choices without tokens.
        """
        told = [self._partials[place] for place in self._told]
        if not told or self._told < self._running:
            return None
        self._told.clear()
        if not self._ended and not any(choice.token_ids for partial in told for choice in partial.outputs):
            return None
        found: list[CompletionOutput] = []
        for place in range(len(self._row.prompts)):
            known = self._ended.get(place) or self._partials.get(place)
            outputs = known.outputs if isinstance(known, RequestOutput) else ()
            found.extend(outputs or self._choices_before(place) or (_NOT_BEGUN,) * self._row.asked.n)
        return found
