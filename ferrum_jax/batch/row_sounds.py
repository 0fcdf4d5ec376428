"""RowSounds: sounds that rows name, the next of them read in threads while others run."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.input.formats import TRANSCRIBES, Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.row_answers import Answer
from ferrum_jax.core.outputs import RequestOutput, Transcription

if TYPE_CHECKING:
    from ferrum_jax.tasks.transcription.heard_sound import HeardSound

READ_AHEAD = 2  # sounds; the features of an hour are 115 MB, and its waveform 230


class RowSounds:
    """The sounds of rows that run, or will run next."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._ahead: dict[int, Future[HeardSound]] = {}
        self._heard: dict[int, HeardSound] = {}
        self._pool: ThreadPoolExecutor | None = None

    def read(self, llm: BatchLLM, index: int, row: Row, following: Sequence[int]) -> Row:
        """The row with its windows as its prompts. following: indices of the rows that are likely to come next.

        Raises ValueError for a sound that cannot be read, and for what the model cannot do.
        """
        for each in (index, *following):
            if each not in self._ahead and self._rows.kinds[each] == TRANSCRIBES:
                named = row if each == index else self._rows.read(each)
                if isinstance(named, Row):
                    self._ahead[each] = self._threads.submit(llm.hear, named.prompts[0], named.how.how)
        heard = self._ahead.pop(index).result()
        self._heard[index] = heard
        return row.with_windows([each.prompt for each in heard.requests], heard.requests[0].sampling)

    def transcription(self, index: int, answers: Sequence[Answer]) -> Transcription:
        """What a row's windows come to. answers: to them, none an error."""
        choices = [answer.outputs[0] for answer in answers if isinstance(answer, RequestOutput)]
        return self._heard[index].transcription(choices)

    def forget(self, index: int) -> None:
        """The row has ended, or names no sound."""
        self._heard.pop(index, None)

    def clear(self) -> None:
        """Nothing runs any more."""
        self._heard.clear()

    def close(self) -> None:
        """No more is read; what is being read is waited for by nobody."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ferrum-sounds")
        return self._pool
