"""Transcript: the rules under which a model writes down what it hears, as its checkpoint says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.io.error_text import quoted

_LISTS = ("languages", "then", "suppressed", "suppressed_first")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
    """Which tokens a transcript may have, and where; of `SamplingParams.transcript`.

    languages: ids of the first token; () where the prompt says the language. then: the tokens behind it, in order; text
    follows. suppressed: ids that no token of text has. suppressed_first: ids that the first token of text does not
    have. end_id: of the end; ids below it are words. stamps_from: the id of the time 0, whose higher ones are later
    times, in equal steps; None of a text without times. most_first_stamp: steps that the first is at most.

    Times come in pairs, the end of a stretch and the beginning of the next, and never go back. One is drawn wherever
    all times together are more likely than each word.
    Source: Radford et al. 2022 (Whisper), as in Hugging Face's WhisperTimeStampLogitsProcessor.

    Raises ValueError naming the field whose value cannot be.
    """

    end_id: int
    languages: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    stamps_from: int | None = None
    most_first_stamp: int | None = None

    def __post_init__(self) -> None:
        for field in _LISTS:
            object.__setattr__(self, field, tuple(getattr(self, field)))
        ids = [self.end_id, *(token for field in _LISTS for token in getattr(self, field))]
        ids += [number for number in (self.stamps_from, self.most_first_stamp) if number is not None]
        wrong = next((number for number in ids if type(number) is not int or number < 0), None)
        if wrong is not None:
            raise ValueError(f"a transcript names token {quoted(wrong)}; tokens are whole numbers, 0 or more")
        if self.stamps_from is not None and self.stamps_from <= self.end_id:
            raise ValueError(
                f"stamps_from is {self.stamps_from} and end_id {self.end_id}; times have higher ids than words"
            )

    @property
    def num_leading(self) -> int:
        """Tokens that come before the text."""
        return bool(self.languages) + len(self.then)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Transcript:
        """The transcript of JSON."""
        return cls(**values)
