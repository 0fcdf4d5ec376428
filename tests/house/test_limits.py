"""What is won stays won: the weight of the code and the length of its trips may only fall.

`python -m scripts.house_limits --lower` writes what is; a rise is written by hand, and argued for in its commit.
"""

from __future__ import annotations

from types import FrameType

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.config import EngineConfig
from scripts import house_limits
from tests.house.trips import Trip, counting
from tests.serve.running import running, serving_llm
from tests.support import GOLDENS, SMALL, small_llm

CHAT = {"model": "small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True}
SPARE_LINES = 1.02  # a mended fault may need some; what grows further is argued for


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    return house_limits.weights()


@pytest.mark.parametrize("room", sorted(house_limits.limits()["lines"]))
def test_a_folder_does_not_grow(room, found):
    allowed = house_limits.limits()["lines"][room]
    assert found["lines"].get(room, 0) <= SPARE_LINES * allowed, "delete what it replaces, or argue for more"


def test_every_folder_has_a_limit(found):
    assert found["lines"].keys() == house_limits.limits()["lines"].keys()


@pytest.mark.parametrize("what", sorted(house_limits.limits()["large"]))
def test_what_is_too_large_to_read_gets_fewer(what, found):
    assert found["large"][what] <= house_limits.limits()["large"][what]


def _within(trip: Trip, name: str) -> None:
    rooms, allowed = trip.rooms, house_limits.limits()["rooms"][name]
    assert 0 < len(rooms) <= allowed, f"{name} passes {len(rooms)} files, {allowed} before: {sorted(rooms)}"


def test_a_prompt_of_generate_passes_few_rooms():
    llm = small_llm("qwen3")
    llm.loaded.executables.load()  # so that no room is one that loads them
    llm.generate("Hello there", SamplingParams(max_tokens=4))
    with counting() as trip, trip.counted():
        llm.generate("Hello there again", SamplingParams(max_tokens=4))
    _within(trip, "LLM.generate")


def test_a_chat_over_http_passes_few_rooms():
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
