"""What is won stays won: the weight of the code and the length of its trips may only fall.

`python -m scripts.house_limits` shows the room that is left; `--lower` writes what is. A rise needs a fall elsewhere.
"""

from types import FrameType

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.config import EngineConfig
from scripts import house_limits
from tests.house.trips import Trip, counting
from tests.serve.running import running, serving_llm
from tests.support import GOLDENS, SMALL, small_llm

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}


@pytest.mark.parametrize("name", sorted(house_limits.limits()["totals"]))
def test_the_project_does_not_outgrow_its_totals(name):
    count, allowed = house_limits.totals()[name], house_limits.limits()["totals"][name]
    assert count <= allowed, (
        f"{count - allowed:,} {name} too many; grown since the limits changed: {house_limits.grown()}"
    )


def test_every_file_and_function_can_be_read_in_one_go():
    assert list(house_limits.too_large()) == []


def _within(trip: Trip, name: str) -> None:
    rooms, allowed = trip.rooms, house_limits.limits()["trips"][name]
    assert 0 < len(rooms) <= allowed, f"{name} passes {len(rooms)} files, {allowed} before: {sorted(rooms)}"


def test_a_prompt_of_generate_passes_few_rooms():
    llm = small_llm("qwen3")
    llm.loaded.executables.load()  # so that no room is one that loads them
    llm.generate("Hello there", SamplingParams(max_tokens=4))
    with counting() as trip, trip.counted():
        llm.generate("Hello there again", SamplingParams(max_tokens=4))
    _within(trip, "LLM.generate")


def test_a_chat_over_http_passes_few_rooms(monkeypatch):
    monkeypatch.setattr("ferrum_jax.serve.engine_side._BEAT_S", 60.0)  # its statistics may come in the middle of a chat
    serving_llm().loaded.executables.load()  # so that no room is one that loads them
    with counting() as trip, running() as server:
        server.ask("/v1/chat/completions", CHAT)
        with trip.counted():
            status, _, _ = server.ask("/v1/chat/completions", CHAT)
        assert status == 200
    _within(trip, "a chat over HTTP")


def test_few_rooms_of_the_start_see_its_config():
    def sees_it(frame: FrameType) -> bool:
        return any(type(value) is EngineConfig for value in frame.f_locals.values())

    with counting(sees_it) as trip, trip.counted():
        LLM(str(GOLDENS / "qwen3"), SMALL)
    _within(trip, "the config of a start")
