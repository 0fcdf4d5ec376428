"""How bodies of /v1/audio/transcriptions and /v1/audio/translations ask for their sound, whatever the door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.io.error_text import quoted
from ferrum_jax.openai.asked import AskedSound
from ferrum_jax.openai.body_fields import RESPONSE_FORMATS, given
from ferrum_jax.sampling_params import SamplingParams

_TIMED = ("srt", "vtt", "verbose_json")  # formats that show times
_STREAMED = ("json", "verbose_json")


def sound_of(body: Mapping[str, Any], *, kind: str) -> AskedSound:
    """How a body asks, without its file. kind: "transcription" or "translation".

    Raises ValueError for the first thing that is wrong.
    """
    answer = body.get("response_format")
    answer = "json" if answer is None else answer
    if answer not in RESPONSE_FORMATS:
        raise ValueError(
            f"response_format is {quoted(answer)}; it must be one of {', '.join(map(repr, RESPONSE_FORMATS))}"
        )
    _check_times(body.get("timestamp_granularities"), answer)
    streams = body.get("stream") is True
    if body.get("stream") not in (None, True, False):
        raise ValueError(f"stream is {quoted(body['stream'])}; it must be true or false")
    if streams and answer not in _STREAMED:
        raise ValueError(
            f"response_format is {answer!r} beside stream, which is one of {' and '.join(map(repr, _STREAMED))}; leave "
            "one of them out"
        )
    temperature = 0.0 if body.get("temperature") is None else body["temperature"]
    params = TranscriptionParams(
        language=body.get("language"),
        task="translate" if kind == "translation" else "transcribe",
        timestamps="segment" if answer in _TIMED else False,
        prompt=body.get("prompt") or None,
        temperature=temperature,
        seed=body.get("seed"),
        max_tokens=body.get("max_tokens"),
        logprobs=answer == "verbose_json",
    )
    return AskedSound(
        params=SamplingParams(temperature=temperature, seed=params.seed, max_tokens=params.max_tokens),
        how=params,
        response_format=answer,
        streams=streams,
        model=given(body, "model"),
        priority=given(body, "priority") or 0,
        timeout_s=given(body, "timeout"),
    )


def _check_times(wanted: object, answer: str) -> None:
    """Raises ValueError for times that are not made, or that the answer does not show."""
    if wanted in (None, []):
        return
    if not isinstance(wanted, list) or not all(isinstance(each, str) for each in wanted):
        raise ValueError(f"timestamp_granularities is {quoted(wanted)}; it must be a list such as ['segment']")
    if "word" in wanted:
        raise ValueError("timestamp_granularities has 'word'; times of words are not made here: give ['segment']")
    if set(wanted) != {"segment"}:
        raise ValueError(f"timestamp_granularities is {quoted(wanted)}; it must be ['segment']")
    if answer != "verbose_json":
        raise ValueError(
            f"timestamp_granularities is given, and response_format is {answer!r}; set that to 'verbose_json'"
        )
