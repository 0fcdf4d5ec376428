"""Sounds in chats over HTTP and in jobs, for a model whose prompts have tokens for them."""

from __future__ import annotations

import base64
import functools
import json

import numpy as np
import openai
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.serve.engine_side import facts_of
from ferrum_jax.serve.http.served_prompts import read_prompt_sounds
from ferrum_jax.serve.link.wire_images import wire_images, with_images
from scripts.goldens.sound_folder import write_folder
from scripts.goldens.sounds import wav
from tests.engine.golden_media import FAMILIES, QWEN
from tests.serve.batch_input import bodies_of_job
from tests.serve.running import running
from tests.support import GOLDENS

FILE = wav(1.3, 16_000, 1)
DATA = base64.b64encode(FILE).decode()
FEW = SamplingParams(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(write_folder(GOLDENS, tmp_path_factory.mktemp("qwen3_asr") / "model")), FAMILIES[QWEN].config)


def chat(given: object, kind: str = "input_audio") -> list:
    return [{"role": "user", "content": [{"type": kind, kind: given}, {"type": "text", "text": "So?"}]}]


def test_a_sound_crosses_to_the_engine_with_the_same_values(llm):
    encoded = llm.model.prompts.encoded({"messages": chat(FILE, "audio")})
    found = with_images(json.loads(json.dumps(wire_images(encoded.images, encoded.media))))
    (clip,), (given,) = found["images"], encoded.images
    np.testing.assert_array_equal(clip.patches, given.patches)
    assert (clip.grid, clip.num_tokens, clip.digest) == (given.grid, 17, given.digest)
    assert tuple(found["media"]) == encoded.media


def test_the_process_that_answers_reads_sounds_as_the_engine_s_does(llm):
    sounds = read_prompt_sounds(json.loads(json.dumps(facts_of(llm)["heard"])))
    assert sounds == llm.model.prompts.sounds and read_prompt_sounds(None) is None


@pytest.mark.slow
def test_a_sound_over_http_is_what_a_program_gives(llm):
    (wanted,) = llm.chat(chat(FILE, "audio"), FEW)
    with running(inner=llm) as server:

        def ask(given: object, kind: str = "input_audio"):
            body = {"model": "small", "messages": chat(given, kind), "max_tokens": 6, "temperature": 0}
            status, _, answer = server.ask("/v1/chat/completions", body)
            return status, answer

        for given, kind in (
            ({"data": DATA, "format": "wav"}, "input_audio"),
            ({"url": f"data:audio/wav;base64,{DATA}"}, "audio_url"),
        ):
            status, answer = ask(given, kind)
            assert status == 200 and answer["choices"][0]["message"]["content"] == wanted.text, answer
            assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        for wrong, kind, said in (
            ({"url": "/etc/passwd"}, "audio_url", "sound 0: the sound's URL is '/etc/passwd'"),
            ({"url": "http://example.com/a.wav"}, "audio_url", "the sound's URL is of example.com; none is allowed"),
            ({"data": "AAAA", "format": "wav"}, "input_audio", "sound 0: the sound is not a file of a kind"),
            ({"data": "AA", "format": "wav", "fps": 3}, "input_audio", "an input_audio part is not like"),
            ({"data": "&&", "format": "wav"}, "input_audio", "sound 0: the sound's data: URL is not base64"),
        ):
            status, answer = ask(wrong, kind)
            assert status == 400 and said in answer["error"]["message"], (wrong, answer)


@pytest.mark.slow
def test_a_model_that_hears_in_prompts_writes_down_sounds_over_http(llm):
    long = wav(12, 16_000, 1)
    (wanted,) = llm.transcribe(long, language="en", max_tokens=6)
    with (
        running(inner=llm) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        ask = functools.partial(
            client.audio.transcriptions.create,
            model="small",
            file=("a.wav", long),
            language="en",
            extra_body={"max_tokens": 6},
        )
        assert ask().text == wanted.text and ask(response_format="text") == f"{wanted.text}\n"
        events = list(ask(stream=True))
        assert events[-1].text == wanted.text == "".join(each.delta for each in events[:-1])
        with pytest.raises(openai.BadRequestError, match="times are asked for, and Qwen3-ASR writes none"):
            ask(response_format="srt")


@pytest.mark.slow
def test_a_row_of_a_job_has_a_sound_as_a_chat_has(llm, tmp_path):
    (wanted,) = llm.chat(chat(FILE, "audio"), FEW)
    (heard,) = llm.transcribe(FILE, language="en", max_tokens=6)
    body = {"messages": chat({"data": DATA, "format": "wav"}), "max_tokens": 6, "temperature": 0.0}
    named = {"file": f"data:audio/wav;base64,{DATA}", "language": "en", "max_tokens": 6}
    one, two = bodies_of_job(llm, tmp_path, {"custom_id": "one", **body}, {"custom_id": "two", **named})
    assert one["choices"][0]["message"]["content"] == wanted.text
    assert two["text"] == heard.text
