"""ForeseenSound: the windows that a sound will have, counted from its header before anything is decoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.ints import ceil_div
from ferrum_jax.transcribing.windows import Transcriber


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForeseenSound:
    """seconds: None where the header does not say them, or the sound is fetched; then one window is counted.

    token_ids: the prompt of each window.
    """

    seconds: float | None
    num_windows: int
    token_ids: Sequence[int]


Foresee = Callable[[str, TranscriptionParams], ForeseenSound]  # of a sound that a job's row names


def foreseen(transcriber: Transcriber, named: str, params: TranscriptionParams) -> ForeseenSound:
    """named: a URL, or a path below the root. Raises ValueError as reading it would, as far as the header tells."""
    token_ids, _ = transcriber.asked(params)
    said = transcriber.sources.said_length(transcriber.sources.of_row(named))
    if said is None:
        return ForeseenSound(seconds=None, num_windows=1, token_ids=token_ids)
    processor = transcriber.processor
    count = ceil_div(said.samples_at(processor.sampling_rate), processor.window_samples)
    return ForeseenSound(seconds=said.num_samples / said.rate, num_windows=count, token_ids=token_ids)
