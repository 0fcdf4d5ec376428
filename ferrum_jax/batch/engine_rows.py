"""The rows that the engine has: what they are answered so far, and what it was asked of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ferrum_jax.batch.batch_llm import RowRequest
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.row_answers import Answer, Answers
from ferrum_jax.core.outputs import CompletionOutput, RequestOutput


class EngineRow(NamedTuple):
    """A row, the epoch of its lease, and its answers."""

    row: Row
    epoch: int
    answers: Answers


class EngineRows(dict[int, EngineRow]):
    """Open rows by index. A request's key is as in `row_answers`."""

    def __init__(self, num_rows: int) -> None:
        """num_rows: of the job."""
        super().__init__()
        self._num_rows = num_rows
        self._ended: dict[int, tuple[float, float]] = {}  # by row: tokens read and written of requests that ended
        self._unanswered: set[int] = set()  # keys of requests that the engine has
        self._awaited: set[int] = set()  # keys of those whose last partial has not come yet
        self._asked_last = False

    def begin(self, index: int, row: Row, epoch: int, before: Sequence[CompletionOutput]) -> Iterator[RowRequest]:
        """Opens a row; its requests, in the order to begin them.

        before: the choices of all prompts as they were journaled.
        """
        self[index] = EngineRow(row, epoch, answers := Answers(row, before))
        for place in answers.order:
            key = index + place * self._num_rows
            self._unanswered.add(key)
            yield RowRequest(key, row.kind, row.prompts[place], row.params_of(place), answers.begin(place))

    def of(self, key: int) -> tuple[int, int]:
        """The place of the prompt in its row, and the row's index."""
        return divmod(key, self._num_rows)

    def heard(self, key: int, output: Answer) -> None:
        """The engine gave an answer or said how far it is."""
        self._awaited.discard(key)
        if isinstance(output, RequestOutput) and output.finished:
            reads, writes = self._ended.get(index := self.of(key)[1], (0.0, 0.0))
            self._ended[index] = reads + len(output.prompt_token_ids), writes + num_written(output.outputs)
        if not isinstance(output, RequestOutput) or output.finished:
            self._unanswered.discard(key)

    def progress(self, of_requests: Mapping[str, tuple[float, float, float]]) -> dict[int, tuple[float, float, float]]:
        """Progress of each row that has begun: its prompts' computed tokens, all of these, and tokens written.

        of_requests: as of `LLM.progress`.
        """
        found = {index: (reads, reads, writes) for index, (reads, writes) in self._ended.items()}
        for key, counts in of_requests.items():
            index = self.of(int(key))[1]
            if counts[0]:
                before = found.get(index, (0.0, 0.0, 0.0))
                found[index] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
        return found

    def close(self, index: int) -> EngineRow:
        """The row, which the engine has forgotten."""
        self._ended.pop(index, None)
        return self.pop(index)

    def ask_last(self) -> bool:
        """Whether to ask for partials once more, for the last time; true once."""
        asks, self._asked_last = not self._asked_last, True
        if asks:
            self._awaited = set(self._unanswered)
        return asks

    @property
    def has_said_all(self) -> bool:
        """Whether it was asked for the last time, and gave all of it."""
        return self._asked_last and not self._awaited

    @property
    def by_epoch(self) -> list[tuple[int, int]]:
        """Index and epoch of each, in order."""
        return sorted((index, open_.epoch) for index, open_ in self.items())

    def forget(self) -> None:
        """The engine has none of them any more."""
        self.clear()
        self._ended.clear()
        self._unanswered.clear()
        self._asked_last = False


def num_written(choices: Sequence[CompletionOutput]) -> int:
    """Tokens of all choices."""
    return sum(len(choice.token_ids) for choice in choices)
