"""ForeseenSound: the windows that a sound will have, counted from its header before anything is decoded."""

import dataclasses
from collections.abc import Callable, Sequence

from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.transcriber import Transcriber


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
    transcriber.check(params)
    said = transcriber.sources.said_length(transcriber.sources.of_row(named))
    if said is None:
        return ForeseenSound(seconds=None, num_windows=1, token_ids=transcriber.prompt_ids(params, None))
    samples = said.samples_at(transcriber.processor.sampling_rate)
    return ForeseenSound(
        seconds=said.num_samples / said.rate,
        num_windows=transcriber.num_windows(samples),
        token_ids=transcriber.prompt_ids(params, samples),
    )
