"""Images over HTTP: data: URLs in a chat are what a program gives; nothing else is read."""

from __future__ import annotations

import base64
import dataclasses
import json
import urllib.request

import numpy as np
import pytest
from PIL import Image

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.serve.link.wire_images import wire_images, with_images
from tests.engine.golden_media import CONFIG
from tests.engine.image_folder import PLACE, picture, write_folder
from tests.serve.running import running
from tests.vision.hostile import saved


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(str(write_folder(tmp_path_factory.mktemp("qwen3_vl") / "model")), CONFIG)


def test_an_image_crosses_to_the_engine_as_bytes_with_the_same_values(llm):
    prompt = {"prompt": f"t7 {PLACE} t9", "images": [picture(1, 64, 96)]}
    encoded = llm.model.prompts.encoded(prompt)
    given = dataclasses.replace(encoded.images[0], token_rows=3)
    sent = json.dumps(wire_images([given], encoded.media))
    assert len(sent) < 2 * 64 * 96 * 3, "base64 of a byte for each channel of a pixel, and little beside"
    found = with_images(json.loads(sent))
    (image,) = found["images"]
    np.testing.assert_array_equal(image.patches, given.patches)
    for field in ("grid", "num_tokens", "token_rows", "digest", "normalising"):
        assert getattr(image, field) == getattr(given, field)
    assert tuple(found["media"]) == encoded.media


def chat(url: object) -> list:
    parts = [{"type": "text", "text": "t7 "}, {"type": "image_url", "image_url": url}, {"type": "text", "text": " t9"}]
    return [{"role": "user", "content": parts}]


def body(url: object) -> dict:
    return {"model": "small", "messages": chat(url), "max_tokens": 6, "temperature": 0}


@pytest.mark.slow
def test_an_image_over_http_is_what_a_program_gives(llm):
    url = {
        "url": "data:image/png;base64," + base64.b64encode(saved(Image.fromarray(picture(1)), "PNG")).decode(),
        "detail": "high",
    }
    (wanted,) = llm.chat(chat(url), SamplingParams(max_tokens=6, temperature=0.0))
    with running(inner=llm) as server:
        before = llm.stats()["images_encoded"]
        for _ in range(2):
            status, _, answer = server.ask("/v1/chat/completions", body(url))
            assert status == 200 and answer["choices"][0]["message"]["content"] == wanted.text
            assert answer["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        assert llm.stats()["images_encoded"] == before + 1, "the engine is a fresh one, and encodes it once"
        page = urllib.request.urlopen(f"{server.url}/").read().decode()
        assert 'type="file"' in page and "ondrop" in page and "onpaste" in page
        with urllib.request.urlopen(f"{server.url}/page/events") as events:
            shown = json.loads(next(line for line in events if line.startswith(b"data: "))[6:])
        assert shown["takes"] == ["image"] and shown["chats"], "the page offers to take pictures"
        for wrong, said in (
            ({"url": "/etc/passwd"}, "data:"),
            ({"url": "file:///etc/passwd"}, "data:"),
            ({"url": "data:image/png;base64,AAAA"}, "image 0: "),
            ({"path": "x.png"}, "an image that is not like"),
            ("x.png", "an image that is not like"),
            ({**url, "detail": "low"}, "an image's detail is 'low'"),
        ):
            status, _, answer = server.ask("/v1/chat/completions", body(wrong))
            assert status == 400 and said in answer["error"]["message"], (wrong, answer)
