"""TranscriptionParams: how a sound is written down, checked when it is made."""

from __future__ import annotations

import dataclasses
from typing import Literal

from ferrum_jax.io.error_text import quoted

TASKS = ("transcribe", "translate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscriptionParams:
    """How one sound is written down.

    language: that is spoken, by its code or English name, as "de" or "german"; None finds it out, in each window.
    task: "transcribe", or "translate" into English. timestamps: "segment" gives the parts of the text with the times at
    which they begin and end; False gives the text alone. prompt: text that is taken to stand before each window, whose
    spelling and manner is followed; of more than 223 tokens the last ones. temperature, seed: as of `SamplingParams`,
    and greedy by default. max_tokens: of each window; None is as many as the model can. logprobs: whether the
    transcription says how likely its tokens were.

    Raises ValueError with the field, its value and what is allowed.
    """

    language: str | None = None
    task: str = "transcribe"
    timestamps: Literal["segment", False] = False
    prompt: str | None = None
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        for field in ("language", "prompt"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ValueError(f"{field} is {quoted(value)}; it must be a text that is not empty, or be left out")
        if self.task not in TASKS:
            raise ValueError(f"task is {quoted(self.task)}; it must be one of {', '.join(map(repr, TASKS))}")
        if self.timestamps == "word":
            raise ValueError("timestamps is 'word'; times of words are not made here: give 'segment'")
        if self.timestamps is not False and self.timestamps != "segment":
            raise ValueError(f"timestamps is {quoted(self.timestamps)}; it must be 'segment' or false")
        if not isinstance(self.logprobs, bool):
            raise ValueError(f"logprobs is {quoted(self.logprobs)}; it must be true or false")
