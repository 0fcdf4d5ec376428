"""A text that is far too long is refused, or its end taken, by every door, with little of it encoded."""

import asyncio
import json
import threading

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.async_llm import AsyncLLM
from ferrum_jax.serve.http import service as service_module
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.text.long_texts import LONG, LongTexts
from ferrum_jax.text.tokenizer import Tokenizer
from tests.serve.running import request, running, serving_llm
from tests.serve.test_under_load import until

TEXT = "the end of a line and so on " * 40_000  # a megabyte
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
CUT = SamplingParams(max_tokens=4, temperature=0.0, truncate_prompt_tokens=16)


@pytest.fixture
def characters(monkeypatch) -> list[int]:
    """How many are given to the library, a number for each call."""
    found: list[int] = []
    for owner in (LongTexts, Tokenizer):
        encoded = owner._encoded

        def noted(self, text, *arguments, encoded=encoded, **how):
            found.append(len(text))
            return encoded(self, text, *arguments, **how)

        monkeypatch.setattr(owner, "_encoded", noted)
    return found


@pytest.fixture(scope="module")
def llm():
    return serving_llm()


def by_python(llm, params):
    return llm.generate(TEXT, params)[0]


def by_chat(llm, params):
    return llm.chat([{"role": "user", "content": TEXT}], params)[0]


def by_row(llm, params):
    ((_, found),) = llm.as_completed([("row", TEXT, params)])
    if isinstance(found, ValueError):
        raise found
    return found


def by_task(llm, params):
    async def run():
        return [output async for output in own.generate(TEXT, params)][-1]

    own = AsyncLLM.over(llm)
    try:
        return asyncio.run(run())
    finally:
        own.close()


DOORS = [by_python, by_chat, by_row, by_task]


@pytest.mark.parametrize("door", DOORS)
def test_a_prompt_that_cannot_fit_is_refused_with_little_of_it_read(llm, characters, door):
    with pytest.raises(ValueError, match=r"this model's maximum context length is .* its max_model_len; .* tokens"):
        door(llm, GREEDY)
    assert sum(characters) < 2 * LONG


@pytest.mark.parametrize("door", DOORS)
def test_only_the_end_of_a_cut_prompt_is_read_with_the_tokens_of_the_whole(llm, characters, door):
    whole = llm.tokenizer._library.encode(TEXT, add_special_tokens=False).ids
    found = door(llm, CUT)
    assert len(found.prompt_token_ids) == 16 and sum(characters) < 3 * LONG
    assert door is by_chat or list(found.prompt_token_ids) == whole[-16:]


def test_http_answers_400_and_cuts_as_a_program_does(llm, characters):
    (wanted,) = llm.generate(TEXT, CUT)
    with running() as server:
        characters.clear()
        asked = {"prompt": TEXT, "max_tokens": 4, "temperature": 0}
        status, _, found = server.ask("/v1/completions", asked)
        assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(characters) < 2 * LONG
        status, _, found = server.ask("/v1/completions", {**asked, "truncate_prompt_tokens": 16})
        assert status == 200 and found["choices"][0]["text"] == wanted.outputs[0].text
        assert found["usage"]["prompt_tokens"] == 16 and sum(characters) < 5 * LONG
        status, _, found = server.ask("/v1/embeddings", {"input": TEXT})
        assert status == 400 and sum(characters) < 7 * LONG
        status, _, found = server.ask("/tokenize", {"prompt": TEXT})
        assert status == 400 and sum(characters) < 9 * LONG
        server.wait_until_idle()


def test_echo_of_a_prompt_that_is_cut_shows_what_runs(llm):
    with running() as server:
        asked = {"prompt": TEXT, "max_tokens": 1, "truncate_prompt_tokens": 16, "echo": True}
        status, _, found = server.ask("/v1/completions", asked)
        assert status == 200 and len(found["choices"][0]["text"]) < 200


def test_a_short_text_never_waits_for_long_ones_and_who_leaves_is_not_encoded_for(monkeypatch, characters):
    """Two long texts hold the threads of long ones; a third waits, and leaves."""
    held, free = [], threading.Event()
    end = LongTexts.end

    def hold(self, text, count):
        held.append(text)
        assert free.wait(60)
        return end(self, text, count)

    monkeypatch.setattr(LongTexts, "end", hold)
    asked = json.dumps({"prompt": TEXT, "max_tokens": 1, "truncate_prompt_tokens": 4}).encode()
    with running(ServerSettings(names=("small",))) as server:
        connections = [server.connect() for _ in range(service_module._TEXT_THREADS)]
        for connection in connections:
            connection.sendall(request("/v1/completions", asked))
        until(lambda: len(held) == len(connections))
        with server.connect() as leaver:
            leaver.sendall(request("/v1/completions", asked))
            until(lambda: server.service._long_texts._queue.num_requests)
        until(lambda: not server.service._long_texts._queue.num_requests)
        assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        free.set()
        for connection in connections:
            assert b"200 OK" in connection.recv(100)
            connection.close()
        server.wait_until_idle()
    assert len(held) == len(connections)
