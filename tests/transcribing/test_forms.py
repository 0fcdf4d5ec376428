"""Transcriptions as OpenAI's API writes them, and text that grows while windows are answered."""

from __future__ import annotations

import pytest

from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.outputs import Transcription, TranscriptionSegment
from ferrum_jax.transcribing.forms import as_json, as_text, as_verbose_json
from ferrum_jax.transcribing.languages import NAMES, code_of, name_of
from ferrum_jax.transcribing.transcription import GrowingText
from tests.transcribing.heard import CASES, text_of

FOUND = Transcription(
    text="We go home --> now.",
    language="de",
    task="transcribe",
    duration_s=3725.25,
    segments=(
        TranscriptionSegment(id=0, start_s=0.0, end_s=1.5, text=" We go home", token_ids=(5, 6), avg_logprob=-0.25),
        TranscriptionSegment(id=1, start_s=3723.04, end_s=3725.2, text=" --> now.\n", token_ids=(7,), avg_logprob=-0.5),
    ),
    token_ids=(5, 6, 7),
)


def test_subtitles_have_numbers_and_times_and_no_arrow_in_a_line():
    assert as_text(FOUND, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nWe go home\n\n2\n01:02:03,040 --> 01:02:05,200\n-> now.\n\n"
    )
    assert as_text(FOUND, "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nWe go home\n\n01:02:03.040 --> 01:02:05.200\n-> now.\n\n"
    )
    assert as_text(FOUND, "text") == "We go home --> now.\n"


def test_json_has_the_text_and_what_is_counted():
    assert as_json(FOUND) == {"text": FOUND.text, "usage": {"type": "duration", "seconds": 3726}}


def test_verbose_json_has_segments_and_the_languages_name():
    found = as_verbose_json(FOUND, 0.2)
    assert (found["task"], found["language"], found["duration"]) == ("transcribe", "german", 3725.25)
    first = found["segments"][0]
    assert first["compression_ratio"] == pytest.approx(11 / 19) and first["text"] == " We go home"
    kept = ("id", "start", "end", "tokens", "temperature", "avg_logprob")
    assert [first[name] for name in kept] == [0, 0.0, 1.5, [5, 6], 0.2, -0.25]


def test_languages_are_known_by_code_and_by_name():
    assert len(NAMES) == 100 and name_of("ht") == "haitian creole" and name_of("xx") == "xx"
    assert code_of("Haitian Creole") == "ht" and code_of("DE") == "de" and code_of("klingon") == "klingon"


@pytest.mark.parametrize("size", [1, 7, 64])
def test_text_that_grows_is_the_whole_text_in_the_end(llm, size):
    transcriber = llm.model.transcriber
    for case in CASES:
        params = TranscriptionParams(timestamps="segment" if case.get("timestamps") else False)
        _, rules = transcriber.tokens.asked(params)
        text = GrowingText(transcriber, params)
        found = ""
        for window in case["windows"]:
            ids = [window["language_id"], *rules.then, *window["token_ids"]]
            for start in range(0, len(ids), size):
                found += text.push(ids[start : start + size])
            found += text.end_window()
        assert found == text_of(case)
