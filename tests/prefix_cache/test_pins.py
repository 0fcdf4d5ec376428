"""Pinned prefixes stay for prompts that begin with them, in every kind of cache group, until they are unpinned."""

from __future__ import annotations

from array import array

import pytest

from ferrum_jax.request import Request
from tests.scheduling.fake_device import Engine

PREFIX = [(i * i + i // 5) % 5 for i in range(40)]
KINDS = {"plain": {}, "windows": {"windows": (None, 6)}, "recurrent": {"max_snapshots": 4}}


def _engine(**sizes) -> Engine:
    return Engine(**({"num_blocks": 24, "max_num_seqs": 2, "max_cached_prompts": 2} | sizes))


def _cached(engine: Engine, prompt: list[int], max_tokens: int = 2) -> int:
    request = engine.add(prompt, max_tokens)
    while request.finish_reason is None:
        engine.step()
    return request.num_cached_tokens


def _pin(engine: Engine, prompt: list[int]) -> None:
    length = len(prompt)
    engine.scheduler.pin_prefix(
        Request(id=-1, token_ids=array("i", prompt), num_prompt_tokens=length, max_total_tokens=length + 1)
    )


def _others(engine: Engine) -> None:
    """A dozen prompts, more than any pool holds."""
    for stem in range(12):
        _cached(engine, [stem % 5, stem // 5, *[stem % 3] * 30], 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [18, 16])
def test_a_pinned_prefix_is_hit_by_what_begins_with_it_and_by_itself_whatever_ran(kind: str, length: int) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:length], 1)
    _pin(engine, PREFIX[:length])
    _others(engine)
    assert _cached(engine, [*PREFIX[:length], 4, 4]) == 16
    assert _cached(engine, PREFIX[:length]) >= 16
    engine.scheduler.unpin()
    _others(engine)
    assert _cached(engine, PREFIX[:length]) == 0
    engine.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_cached_as_a_whole_is_not_pinned(kind: str) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:18], 1)
    _others(engine)
    with pytest.raises(ValueError, match="the prefix is not cached as a whole, so it cannot be pinned"):
        _pin(engine, PREFIX[:18])
    engine.drain()


def test_more_snapshots_than_are_kept_beside_the_rows_are_not_pinned() -> None:
    engine = _engine(max_snapshots=2, num_blocks=40, max_cached_prompts=0)
    for stem in range(2):
        _cached(engine, [stem, *PREFIX[:17]], 1)
        _pin(engine, [stem, *PREFIX[:17]])
    _cached(engine, [2, *PREFIX[:17]], 1)
    with pytest.raises(ValueError, match="1 more state snapshots pinned make 3, more than max_state_snapshots, 2"):
        _pin(engine, [2, *PREFIX[:17]])
    assert len(engine.cache.pins.ids(engine.cache.states.pool)) == 2 and engine.cache.metrics().pinned == 8
    _pin(engine, [1, *PREFIX[:17]])  # it is pinned already
    rows = [engine.add([stem, *PREFIX[:17]], 6) for stem in range(3, 5)]
    engine.step()
    assert all(row.slot for row in rows), "a pin takes the state of no row"
    engine.scheduler.unpin()
    engine.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_forgets_pinned_prefixes_too(kind: str) -> None:
    engine = _engine(**KINDS[kind])
    _cached(engine, PREFIX[:18], 1)
    _pin(engine, PREFIX[:18])
    engine.scheduler.reset()
    assert engine.cache.metrics().pinned == engine.cache.metrics().entries == 0
    assert _cached(engine, [*PREFIX[:18], 4]) == 0
    engine.drain()
