"""Transcriptions as OpenAI's API writes them, and text that grows while windows are answered.

The windows of a sound are known from its header: as many as there are when it is read.
"""

import base64

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.core.outputs import Transcription, TranscriptionSegment
from ferrum_jax.inputs.audio.sound_sources import SoundSources
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.tasks.transcription.foreseen import ForeseenSound, foreseen
from ferrum_jax.tasks.transcription.forms import as_json, as_text, as_verbose_json
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.languages import NAMES, code_of, name_of
from ferrum_jax.tasks.transcription.transcription import GrowingText
from ferrum_jax.tasks.transcription.whisper_transcriber import WhisperTranscriber
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.tokenizer import Tokenizer
from scripts.goldens.sounds import sound, wav
from tests.sound.hostile_sounds import muxed, written
from tests.support import GOLDENS
from tests.transcribing.heard import CASES, NAME, RATE, text_of

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


WINDOWS = {1: 1, 30: 1, 31: 2, 95: 4}
PARAMS = TranscriptionParams(language="en")


@pytest.fixture
def folder(tmp_path):
    for seconds in WINDOWS:
        (tmp_path / f"{seconds}.wav").write_bytes(wav(seconds, RATE, 1))
    samples = sound(31, seed=0)[:, None]
    (tmp_path / "31.mp3").write_bytes(written(samples, RATE, "MP3", "MPEG_LAYER_III"))
    (tmp_path / "31.aac").write_bytes(muxed(samples, RATE, "adts", "aac"))
    return tmp_path


@pytest.fixture
def transcriber(folder):
    model = GOLDENS / NAME
    prompts = PromptEncoder(tokenizer=Tokenizer.load(model), chat=None, hears=True)
    return WhisperTranscriber.of_folder(model, prompts, SoundSources(root=str(folder)))


@pytest.mark.parametrize("name", ["1.wav", "30.wav", "31.wav", "95.wav", "31.mp3"])
def test_windows_are_foreseen_from_a_header(transcriber, name):
    found = foreseen(transcriber, name, PARAMS)
    seconds = int(name.partition(".")[0])
    assert found.seconds == seconds and found.num_windows == WINDOWS[seconds]
    heard = HeardSound.of(transcriber, transcriber.sources.of_row(name), PARAMS)
    assert len(heard.windows) == found.num_windows
    assert all(request.prompt["prompt_token_ids"] == found.token_ids for request in heard.requests)


def test_a_sound_that_is_given_in_its_row_is_foreseen_too(transcriber, folder):
    url = "data:audio/wav;base64," + base64.b64encode((folder / "31.wav").read_bytes()).decode()
    assert foreseen(transcriber, url, PARAMS).num_windows == 2


def test_one_window_stands_for_a_sound_whose_length_nothing_says(transcriber):
    ids = foreseen(transcriber, "1.wav", PARAMS).token_ids
    unknown = ForeseenSound(seconds=None, num_windows=1, token_ids=ids)
    assert foreseen(transcriber, "31.aac", PARAMS) == unknown  # FFmpeg guesses, and decoding tells
    assert foreseen(transcriber, "https://example.com/a.wav", PARAMS) == unknown  # nothing is fetched


@pytest.mark.parametrize(("name", "says"), [("none.wav", "cannot be read"), ("../a.wav", "not below the image root")])
def test_a_sound_that_cannot_be_read_is_refused(transcriber, name, says):
    with pytest.raises(ValueError, match=says):
        foreseen(transcriber, name, PARAMS)


def test_the_plan_of_a_folder_counts_windows(folder, capsys):
    where = ["--input", str(folder), "--output", str(folder / "out.jsonl")]
    assert main(["batch", "--plan", "--model", str(GOLDENS / NAME), *where]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "sounds 6 of 188 s, in 11 windows" in words
    assert "sounds of unknown length" in words and not (folder / "out.jsonl.journal").exists()
