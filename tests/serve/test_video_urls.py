"""Videos over HTTP and in jobs: data: URLs in a chat are what a program gives; nothing else is read."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.serve.link.wire_images import wire_images, with_images
from scripts.goldens import video_folder
from scripts.goldens.video_folder import film
from tests.engine.test_videos import CONFIG
from tests.serve.batch_input import bodies_of_job
from tests.serve.running import running
from tests.support import GOLDENS
from tests.vision.film_files import film_file

FILE = film_file(film(12, 48, 64, 3), "mkv", fps=4)
URL = "data:video/x-matroska;base64," + base64.b64encode(FILE).decode()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = video_folder.write_folder(GOLDENS, tmp_path_factory.mktemp("qwen3_vl") / "model", "qwen3_vl")
    return LLM(str(folder), CONFIG)


def chat(url: object) -> list:
    return [{"role": "user", "content": [{"type": "video_url", "video_url": url}, {"type": "text", "text": "So?"}]}]


def test_a_video_crosses_to_the_engine_as_bytes_with_the_same_values(llm):
    encoded = llm.model.prompts.encoded({"messages": chat({"url": URL})})
    found = with_images(json.loads(json.dumps(wire_images(encoded.images, encoded.media))))
    assert len(found["images"]) == len(encoded.images) == 3  # 12 frames, 4 of a second: 6 are seen
    for image, given in zip(found["images"], encoded.images, strict=True):
        np.testing.assert_array_equal(image.patches, given.patches)
        assert (image.grid, image.temporal, image.digest) == (given.grid, 2, given.digest)
    assert tuple(found["media"]) == encoded.media


def test_the_two_frames_of_a_group_are_not_the_same(llm):
    encoded = llm.model.prompts.encoded({"messages": chat({"url": URL})})
    patches = encoded.images[0].patches.reshape(-1, 3, 2, 16)
    assert np.abs(patches[:, :, 0] - patches[:, :, 1]).max() > 0.1


@pytest.mark.slow
def test_a_video_over_http_is_what_a_program_gives(llm):
    chats = [{"role": "user", "content": [{"type": "video", "video": FILE}, {"type": "text", "text": "So?"}]}]
    (wanted,) = llm.chat(chats, SamplingParams(max_tokens=6, temperature=0.0))
    with running(inner=llm) as server:

        def ask(url: object):
            body = {"model": "small", "messages": chat(url), "max_tokens": 6, "temperature": 0}
            status, _, answer = server.ask("/v1/chat/completions", body)
            return status, answer

        for _ in range(2):
            status, answer = ask({"url": URL})
            assert status == 200 and answer["choices"][0]["message"]["content"] == wanted.text
            assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        for wrong, said in (
            ({"url": "/etc/passwd"}, "video 0: the video's URL is '/etc/passwd'"),
            ({"url": "http://example.com/a.mp4"}, "video 0: the video's URL is of example.com; none is allowed"),
            ({"url": "data:video/mp4;base64,AAAA"}, "video 0: the video is not a file of a kind"),
            ({"url": URL, "fps": 3}, "a video that is not like"),
            (URL, "a video that is not like"),
        ):
            status, answer = ask(wrong)
            assert status == 400 and said in answer["error"]["message"], (wrong, answer)


@pytest.mark.slow
def test_a_row_of_a_job_has_a_video_as_a_chat_has(llm, tmp_path):
    (wanted,) = llm.chat(chat({"url": URL}), SamplingParams(max_tokens=6, temperature=0.0))
    row = {"custom_id": "one", "messages": chat({"url": URL}), "max_tokens": 6, "temperature": 0.0}
    (body,) = bodies_of_job(llm, tmp_path, row)
    assert body["choices"][0]["message"]["content"] == wanted.text
