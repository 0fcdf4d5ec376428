"""A long body is decoded and checked in a thread, and one of too many values is refused before it is decoded.

Items of a response's input as the messages of a chat.
"""

import json
import threading

import pytest

from ferrum_jax.openai import json_text as reading
from ferrum_jax.openai.contents import messages_of
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.openai.json_text import num_commas, read_body
from ferrum_jax.openai.response_body import input_messages
from ferrum_jax.serve.http import exchange
from tests.rows import rows_beside
from tests.serve.running import running

MESSAGES = [{"role": "user", "content": "x"}]
PATHS = rows_beside(__file__)["paths"]


def test_long_bodies_are_read_in_a_thread_by_every_door(monkeypatch):
    seen = []

    def noted(content):
        seen.append(threading.current_thread().name.startswith("ferrum-bodies"))
        return read_body(content)

    monkeypatch.setattr(exchange, "read_body", noted)
    with running() as server:
        for path, body in PATHS.items():
            for unknown in ("y", "y" * exchange._LONG_BODY):
                status, _, answer = server.ask(path, body | {"unknown": unknown})
                assert status == 400 and answer["error"]["param"] == "unknown", (path, answer)
        status, _, answer = server.ask("/detokenize", {"tokens": [5] * 60_000})
        assert status == 200 and len(answer["prompt"]) >= 60_000
        status, _, answer = server.ask("/v1/completions", {"prompt": "x", "cache_salt": "\ud800"})
        assert status == 400 and "half of a surrogate pair" in answer["error"]["message"]
        assert answer["error"]["param"] == "cache_salt"
        status, _, answer = server.ask("/v1/completions", {"prompt": "\ud800"})
        assert status == 400 and "surrogates" in answer["error"]["message"] and answer["error"]["param"] == "prompt"
    assert seen == [False, True] * len(PATHS) + [True, False, False]


@pytest.mark.parametrize(
    "value",
    [
        *([], list(range(9)), ["a,b", 'c",",d', "\\", '\\",', ","], {"a,": [1, {"b": "\\\\,"}]}),
        *(",,,", "\\\\\\", ["é,", "，"]),
    ],
)
def test_commas_inside_texts_are_no_values(monkeypatch, value):
    def of(value) -> int:
        parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        return max(0, len(parts) - 1) + sum(map(of, parts))

    monkeypatch.setattr(reading, "MOST_VALUES", 1)
    assert num_commas(json.dumps(value, ensure_ascii=False).encode()) == of(value)


def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(reading, "MOST_VALUES", 4)
    assert read_body(b'{"prompt": "a,b,c,d,e,f,g", "stop": [1, 2, 3]}')["stop"] == [1, 2, 3]
    with pytest.raises(FieldError, match=r"the body has 5 values; at most 4 are read"):
        read_body(b'{"prompt": [[], [], [], [], ')


URL = "data:image/png;base64,AA=="


@pytest.mark.parametrize(
    ("more", "detail"), [({}, {}), ({"detail": "auto"}, {"detail": "auto"}), ({"detail": None}, {})]
)
def test_images_and_texts_are_parts_of_a_message(more, detail):
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": URL, **more}]
    (message,) = input_messages([{"role": "user", "content": parts}])
    seen = {"type": "image_url", "image_url": {"url": URL, **detail}}
    assert message == {"role": "user", "content": [{"type": "text", "text": "What?"}, seen]}
    assert messages_of("input", [message])[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}


def test_sounds_are_parts_and_files_by_their_id_are_refused():
    sound = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    assert input_messages([{"role": "user", "content": [sound]}])[0]["content"] == [sound]
    with pytest.raises(FieldError, match="input_image with its URL"):
        input_messages([{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}])
