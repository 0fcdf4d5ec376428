"""A transcription in the forms that OpenAI's API has: json, text, srt, vtt and verbose_json.

Source: the API's reference of /v1/audio/transcriptions; subtitles as in Whisper's own writers.
"""

import json
import math
import zlib
from typing import Any

from ferrum_jax.core.outputs import Transcription, TranscriptionSegment
from ferrum_jax.tasks.transcription.languages import name_of

OF_TEXT = {"text": "text/plain", "srt": "text/plain", "vtt": "text/vtt"}  # forms that are no JSON, and their types


def as_json(found: Transcription) -> dict[str, Any]:
    """OpenAI's "json"."""
    return {"text": found.text, "usage": usage_of(found)}


def as_verbose_json(found: Transcription, temperature: float) -> dict[str, Any]:
    """OpenAI's "verbose_json". How likely it is that nobody speaks is not told."""
    return {
        "task": found.task,
        "language": None if found.language is None else name_of(found.language),
        "duration": found.duration_s,
        "text": found.text,
        "segments": [_segment(each, temperature) for each in found.segments],
        "usage": usage_of(found),
    }


def _segment(each: TranscriptionSegment, temperature: float) -> dict[str, Any]:
    content = each.text.encode()
    return {
        "id": each.id,
        "seek": 0,
        "start": each.start_s,
        "end": each.end_s,
        "text": each.text,
        "tokens": list(each.token_ids),
        "temperature": temperature,
        "avg_logprob": None if each.avg_logprob is None else round(each.avg_logprob, 6),
        "compression_ratio": round(len(content) / len(zlib.compress(content)), 6),
    }


def usage_of(found: Transcription) -> dict[str, Any]:
    """What is counted: seconds of sound, begun ones whole."""
    return {"type": "duration", "seconds": math.ceil(found.duration_s)}


def as_object(found: Transcription, form: str, temperature: float) -> Any:
    """The transcription in a form, as JSON has it: a text where the form is one."""
    if form == "json":
        return as_json(found)
    return as_verbose_json(found, temperature) if form == "verbose_json" else as_text(found, form)


def as_text(found: Transcription, form: str) -> str:
    """The transcription in one of the forms of OF_TEXT."""
    if form == "text":
        return f"{found.text}\n"
    if form == "vtt":
        return "WEBVTT\n\n" + "".join(
            f"{_clock(each.start_s, '.')} --> {_clock(each.end_s, '.')}\n{_line(each)}\n\n" for each in found.segments
        )
    return "".join(
        f"{number}\n{_clock(each.start_s, ',')} --> {_clock(each.end_s, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(found.segments, start=1)
    )


def _line(each: TranscriptionSegment) -> str:
    """The segment's text, which neither ends a subtitle nor looks like its times."""
    return " ".join(each.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    """As in 00:01:02,500."""
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def delta_event(text: str) -> bytes:
    """New text of a stream."""
    return _event({"type": "transcript.text.delta", "delta": text})


def segment_event(found: TranscriptionSegment) -> bytes:
    """A part of a stream's text with its times, behind the deltas that it is made of."""
    times = {"start": found.start_s, "end": found.end_s}
    return _event({"type": "transcript.text.segment", "id": str(found.id), **times, "text": found.text})


def done_event(found: Transcription) -> bytes:
    """The end of a stream, with all of the text."""
    return _event({"type": "transcript.text.done", "text": found.text, "usage": usage_of(found)})


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
