"""Images, videos and sounds in chats over HTTP and in jobs are what a program gives; nothing else is read."""

import base64
import dataclasses
import functools
import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.serve.engine_side import facts_of
from ferrum_jax.serve.http.served_prompts import read_prompts
from ferrum_jax.serve.link.wire_images import wire_images, with_images
from scripts.goldens import sound_folder, video_folder
from scripts.goldens.sounds import wav
from scripts.goldens.video_folder import film
from tests.engine import golden_media, image_folder, test_videos
from tests.engine.golden_media import FAMILIES, QWEN
from tests.serve.batch_input import bodies_of_job
from tests.serve.running import running
from tests.support import GOLDENS
from tests.vision.film_files import film_file
from tests.vision.hostile import saved

SOUND, FILM = wav(1.3, 16_000, 1), film_file(film(12, 48, 64, 3), "mkv", fps=4)
PNG = saved(Image.fromarray(image_folder.picture(1, 64, 96)), "PNG")
PICTURED = ("token_rows", "temporal", "normalising")
FEW = SamplingParams(max_tokens=6, temperature=0.0)


def data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part(kind: str, value: object) -> dict[str, Any]:
    return {"type": kind, kind: value}


def chat(asked: dict[str, Any]) -> list:
    parts = [{"type": "text", "text": "t7 "}, asked, {"type": "text", "text": " t9"}]
    return [{"role": "user", "content": parts}]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medium:
    """A kind of media, and a model that takes it.

    given: parts of a chat that give one file; the program's own is `plain`. wrong: parts, and what is said of each.
    """

    write_model: Callable[[Path], Path]
    config: EngineConfig
    plain: dict[str, Any]
    given: tuple[dict[str, Any], ...]
    wrong: tuple[tuple[dict[str, Any], str], ...]
    num_encoded: int


IMAGE = {"url": data("image/png", PNG), "detail": "high"}
VIDEO = {"url": data("video/x-matroska", FILM)}
INPUT = {"data": base64.b64encode(SOUND).decode(), "format": "wav"}
MEDIA = {
    "image": Medium(
        write_model=image_folder.write_folder,
        config=golden_media.CONFIG,
        plain=part("image_url", IMAGE),
        given=(part("image_url", IMAGE), part("image_url", IMAGE)),
        wrong=(
            (part("image_url", {"url": "/etc/passwd"}), "data:"),
            (part("image_url", {"url": "file:///etc/passwd"}), "data:"),
            (part("image_url", {"url": "data:image/png;base64,AAAA"}), "image 0: "),
            (part("image_url", {"path": "x.png"}), "an image that is not like"),
            (part("image_url", "x.png"), "an image that is not like"),
            (part("image_url", {**IMAGE, "detail": "low"}), "an image's detail is 'low'"),
        ),
        num_encoded=1,
    ),
    "video": Medium(
        write_model=lambda folder: video_folder.write_folder(GOLDENS, folder, "qwen3_vl"),
        config=test_videos.CONFIG,
        plain=part("video", FILM),
        given=(part("video_url", VIDEO), part("video_url", VIDEO)),
        wrong=(
            (part("video_url", {"url": "/etc/passwd"}), "video 0: the video's URL is '/etc/passwd'"),
            (part("video_url", {"url": "http://a.b/a.mp4"}), "video 0: the video's URL is of a.b; none is allowed"),
            (part("video_url", {"url": "data:video/mp4;base64,AAAA"}), "video 0: the video is not a file of a kind"),
            (part("video_url", {**VIDEO, "fps": 3}), "a video that is not like"),
            (part("video_url", VIDEO["url"]), "a video that is not like"),
        ),
        num_encoded=3,  # 12 frames, 4 of a second: 6 are seen, two in a group
    ),
    "sound": Medium(
        write_model=lambda folder: sound_folder.write_folder(GOLDENS, folder),
        config=FAMILIES[QWEN].config,
        plain=part("audio", SOUND),
        given=(part("input_audio", INPUT), part("audio_url", {"url": data("audio/wav", SOUND)})),
        wrong=(
            (part("audio_url", {"url": "/etc/passwd"}), "sound 0: the sound's URL is '/etc/passwd'"),
            (part("audio_url", {"url": "http://a.b/a.wav"}), "the sound's URL is of a.b; none is allowed"),
            (part("input_audio", {**INPUT, "data": "AAAA"}), "sound 0: the sound is not a file of a kind"),
            (part("input_audio", {**INPUT, "fps": 3}), "an input_audio part is not like"),
            (part("input_audio", {**INPUT, "data": "&&"}), "sound 0: the sound's data: URL is not base64"),
        ),
        num_encoded=1,
    ),
}


@pytest.fixture(scope="module")
def llm_of(tmp_path_factory):
    """The LLM that takes a kind of media, made once."""

    @functools.cache
    def made(kind: str) -> LLM:
        medium = MEDIA[kind]
        return LLM(str(medium.write_model(tmp_path_factory.mktemp(kind) / "model")), medium.config)

    return made


@pytest.mark.parametrize("kind", MEDIA)
def test_media_cross_to_the_engine_with_the_same_values(llm_of, kind):
    encoded = llm_of(kind).model.prompts.encoded({"messages": chat(MEDIA[kind].plain)})
    given = [each if kind == "sound" else dataclasses.replace(each, token_rows=3) for each in encoded.images]
    sent = json.dumps(wire_images(given, encoded.media))
    assert kind != "image" or len(sent) < 2 * 64 * 96 * 3, "base64 of a byte for each channel of a pixel"
    found = with_images(json.loads(sent))
    assert len(found["images"]) == len(given) == MEDIA[kind].num_encoded
    for each, wanted in zip(found["images"], given, strict=True):
        np.testing.assert_array_equal(each.patches, wanted.patches)
        for field in ("grid", "num_tokens", "digest", *(() if kind == "sound" else PICTURED)):
            assert getattr(each, field) == getattr(wanted, field), field
    assert tuple(found["media"]) == encoded.media


def test_the_two_frames_of_a_group_are_not_the_same(llm_of):
    encoded = llm_of("video").model.prompts.encoded({"messages": chat(MEDIA["video"].plain)})
    patches = encoded.images[0].patches.reshape(-1, 3, 2, 16)
    assert np.abs(patches[:, :, 0] - patches[:, :, 1]).max() > 0.1


def test_the_process_that_answers_reads_sounds_as_the_engine_s_does(llm_of):
    facts = json.loads(json.dumps(facts_of(llm_of("sound"))))
    assert read_prompts(facts).prompts.sounds == llm_of("sound").model.prompts.sounds
    assert read_prompts({**facts, "heard": None}).prompts.sounds is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", MEDIA)
def test_media_over_http_are_what_a_program_gives(llm_of, kind):
    llm, medium = llm_of(kind), MEDIA[kind]
    (wanted,) = llm.chat(chat(medium.plain), FEW)
    with running(inner=llm) as server:

        def ask(asked: dict[str, Any]) -> tuple[int, Any]:
            body = {"model": "small", "messages": chat(asked), "max_tokens": 6, "temperature": 0}
            status, _, answer = server.ask("/v1/chat/completions", body)
            return status, answer

        before = llm.stats()["images_encoded"]
        for asked in medium.given:
            status, answer = ask(asked)
            assert status == 200 and answer["choices"][0]["message"]["content"] == wanted.text, answer
            assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        if kind == "image":
            assert llm.stats()["images_encoded"] == before + 1, "the engine is a fresh one, and encodes it once"
        for wrong, said in medium.wrong:
            status, answer = ask(wrong)
            assert status == 400 and said in answer["error"]["message"], (wrong, answer)


@pytest.mark.slow
def test_the_page_offers_to_take_pictures(llm_of):
    with running(inner=llm_of("image")) as server:
        page = urllib.request.urlopen(f"{server.url}/").read().decode()
        assert 'type="file"' in page and "ondrop" in page and "onpaste" in page
        with urllib.request.urlopen(f"{server.url}/page/events") as events:
            shown = json.loads(next(line for line in events if line.startswith(b"data: "))[6:])
        assert shown["takes"] == ["image"] and shown["chats"]


@pytest.mark.slow
def test_a_model_that_hears_in_prompts_writes_down_sounds_over_http(llm_of):
    llm, long = llm_of("sound"), wav(12, 16_000, 1)
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
@pytest.mark.parametrize("kind", MEDIA)
def test_a_row_of_a_job_has_media_as_a_chat_has(llm_of, kind, tmp_path):
    llm, medium = llm_of(kind), MEDIA[kind]
    (wanted,) = llm.chat(chat(medium.plain), FEW)
    rows = [{"custom_id": "chat", "messages": chat(medium.given[0]), "max_tokens": 6, "temperature": 0.0}]
    texts = [wanted.text]
    if kind == "sound":
        rows.append({"custom_id": "file", "file": data("audio/wav", SOUND), "language": "en", "max_tokens": 6})
        texts.append(llm.transcribe(SOUND, language="en", max_tokens=6)[0].text)
    bodies = bodies_of_job(llm, tmp_path, *rows)
    assert [body["choices"][0]["message"]["content"] if "choices" in body else body["text"] for body in bodies] == texts
