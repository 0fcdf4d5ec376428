"""Sounds as users give them to a model whose prompts have tokens for them: beside a prompt, or in a chat's messages."""

import base64
import dataclasses
import io

import numpy as np
import pytest
import soundfile

from ferrum_jax import LLM
from scripts.goldens.sound_folder import PLACE, write_folder
from scripts.goldens.sounds import sound
from tests.engine.golden_media import END, FAMILIES, GREEDY, QWEN, START
from tests.engine.golden_media import PLACE as AUDIO
from tests.models.sound_goldens import load
from tests.rows import rows_beside
from tests.support import GOLDENS, small_llm

RATE = 16_000
FEW = dataclasses.replace(GREEDY, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(GOLDENS, tmp_path_factory.mktemp("qwen3_asr") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), FAMILIES[QWEN].config)


def one_pad(ids: list[int]) -> list[int]:
    """A golden prompt with one placeholder for each of its sounds."""
    return [each for at, each in enumerate(ids) if each != AUDIO or ids[at - 1] != AUDIO]


def wav_of(samples: np.ndarray) -> bytes:
    content = io.BytesIO()
    soundfile.write(content, samples, RATE, format="WAV", subtype="FLOAT")
    return content.getvalue()


@pytest.mark.parametrize("prompt", [1, 2])
def test_tokens_after_waveforms_are_the_reference_s(llm, prompt):
    golden = load()[2]
    ids, seconds = golden[f"prompt_{prompt}"].tolist(), golden[f"seconds_{prompt}"].tolist()
    sounds = [(sound(each, number), RATE) for number, each in enumerate(seconds)]
    (output,) = llm.generate({"prompt_token_ids": one_pad(ids), "sounds": sounds}, GREEDY)
    assert list(output.prompt_token_ids) == ids
    assert list(output.token_ids) == golden[f"tokens_{prompt}"].tolist()
    assert llm.stats()["compiles_after_ready"] == 0


def test_a_sound_beside_a_prompt_and_one_in_a_chat_are_the_same_and_encoded_once(llm, tmp_path):
    samples, text = sound(1.1, 5), f"Say: {PLACE} so?"
    content, path = wav_of(samples), tmp_path / "said.wav"
    path.write_bytes(content)
    (first,) = llm.generate({"prompt": text, "sounds": [(samples, RATE)]}, FEW)
    assert first.prompt_token_ids.count(AUDIO) == 15 and first.prompt_token_ids[5:7] == (START, AUDIO)
    before, encoded = llm.stats(), base64.b64encode(content).decode()
    forms = [
        {"type": "audio", "audio": content},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    ]
    said, so = {"type": "text", "text": "Say: "}, {"type": "text", "text": " so?"}
    again = [
        llm.generate({"prompt": text, "sounds": [path]}, FEW)[0],
        *(llm.chat([{"role": "user", "content": [said, form, so]}], FEW)[0] for form in forms),
    ]
    for output in again:
        assert output.token_ids == first.token_ids and output.prompt_token_ids == first.prompt_token_ids
        assert output.num_cached_tokens == len(first.prompt_token_ids) and output.num_cached_media == 1
    assert llm.stats()["sounds_encoded"] == before["sounds_encoded"]


def test_another_sound_under_the_same_text_hits_nothing_behind_it(llm):
    prompts = [{"prompt": f"ab {PLACE} c", "sounds": [(sound(1.1, seed), RATE)]} for seed in (7, 8)]
    first, other = llm.generate(prompts, FEW)
    assert first.prompt_token_ids == other.prompt_token_ids and first.token_ids != other.token_ids
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        *rows_beside(__file__)["what is wrong with sounds is said"],
        ({"prompt": "a", "sounds": [b"RIFF"]}, "0 placeholders <.audio_pad.> and 1 sound; write one for each sound"),
        ({"prompt": PLACE, "sounds": []}, None),
        ({"prompt": PLACE, "sounds": [b"RIFF"]}, "sound 0: the sound is not a file of a kind that is read here"),
        ({"prompt": PLACE, "sounds": ["/etc/passwd"]}, "sound 0: the sound's URL is '/etc/passwd'; it must begin with"),
        ({"prompt": PLACE, "sounds": [(np.zeros(160_000, np.float32), RATE)]}, "sound 0: .* at most 5 s are taken"),
        ({"prompt": PLACE, "images": [np.zeros((8, 8, 3), np.uint8)]}, "1 images, and this model takes none"),
        ({"prompt": PLACE, "sounds": 3}, "sounds is a int; it must be a list of sounds"),
        ({"prompt_token_ids": [7, START, AUDIO, AUDIO, END], "sounds": [b"RIFF"]}, "2 placeholders"),
        (
            {"prompt_token_ids": [7, AUDIO, AUDIO], "sounds": [(sound(0.1, 1), RATE)] * 2},
            r"runs of \[14\] tokens <.audio_pad.>, and its sounds have \[7, 7\]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "data:x"}}] * 2}]},
            "sound 0: the sound's URL is 'data:x'; write data:audio/wav;base64",
        ),
    ],
)
def test_what_is_wrong_with_sounds_is_said(llm, prompt, said):
    if said is None:
        assert llm.generate(prompt, FEW)[0].prompt_token_ids == (START, AUDIO, END)
        return
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt, FEW)


def test_more_sounds_than_fit_are_refused_before_their_features_are_made(llm):
    sounds = [(sound(4.9, 0), RATE)] * 9
    with pytest.raises(ValueError, match=r"the first \d sounds of the prompt have \d\d\d tokens, and \d\d\d fit"):
        llm.generate({"prompt": PLACE * 9, "sounds": sounds}, FEW)


def test_a_model_that_hears_nothing_refuses_sounds():
    with pytest.raises(ValueError, match="the prompt has 1 sounds, and this model hears none"):
        small_llm("qwen3").generate({"prompt_token_ids": [7], "sounds": [(sound(0.1, 1), RATE)]}, FEW)


@pytest.mark.slow
def test_a_model_that_is_served_for_text_alone_refuses_sounds(folder):
    text_alone = LLM(str(folder), dataclasses.replace(FAMILIES[QWEN].config, max_image_tokens=0))
    assert len(text_alone.generate("abc", FEW)[0].token_ids) == 6
    with pytest.raises(ValueError, match="served with max_image_tokens=0"):
        text_alone.generate({"prompt": PLACE, "sounds": [(sound(0.1, 1), RATE)]}, FEW)
