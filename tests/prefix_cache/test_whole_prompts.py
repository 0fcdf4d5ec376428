"""Whole prompts that are cached, and the copies of partial tails: one sentence each, over the fake device."""

import pytest

from tests.scheduling.fake_device import Engine

PROMPT = [(i * i + i // 3) % 5 for i in range(20)]


def _engine(**sizes) -> Engine:
    return Engine(**{"max_num_batched_tokens": 64, "max_cached_prompts": 4, **sizes})


@pytest.fixture
def engine() -> Engine:
    return _engine()


def _run(engine: Engine, length: int, **wishes):
    request = engine.add(PROMPT[:length], 3, **wishes)
    engine.drain()
    return request


def _computed(engine: Engine, length: int, **wishes) -> int:
    """Tokens that a request computes before its first new one."""
    before = len(engine.plans)
    _run(engine, length, **wishes)
    return engine.plans[before].shards[0].num_tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 12, 18])
def test_a_whole_prompt_hit_computes_nothing(engine: Engine, length: int) -> None:
    assert _computed(engine, length) == length
    assert _computed(engine, length) == 0
    assert engine.requests[1].num_cached_tokens == length
    counters = engine.scheduler.metrics()
    assert (counters.prompt_hits, counters.saved_prefill_tokens, counters.cached_prompts) == (1, length, 1)


def test_an_entry_owns_a_copy_of_its_partial_tail_and_lends_a_copy_of_that(engine: Engine) -> None:
    _run(engine, 6)
    _run(engine, 6)
    (kept,), (lent,) = engine.plans[0].shards[0].copies_after, engine.plans[3].shards[0].copies_before
    assert kept.source == engine.plans[0].shards[0].block_tables[0][0, 1] != kept.target == lent.source
    assert lent.target == engine.plans[3].shards[0].block_tables[0][0, 1] != lent.source
    assert engine.scheduler.metrics().copied_blocks == 2


def test_a_prompt_that_ends_with_its_block_needs_no_copy(engine: Engine) -> None:
    _run(engine, 8)
    assert _computed(engine, 8) == 0 and engine.scheduler.metrics().copied_blocks == 0


@pytest.mark.parametrize(("length", "computed"), [(17, 1), (19, 3), (15, 3), (6, 2)])
def test_a_partial_match_of_a_cached_prompt_is_not_served_as_one(engine: Engine, length: int, computed: int) -> None:
    _run(engine, 18)
    assert _computed(engine, length) == computed and engine.scheduler.metrics().prompt_hits == 0


def test_a_prompt_of_another_tenant_is_another_prompt(engine: Engine) -> None:
    _run(engine, 6)
    assert _computed(engine, 6, salt=b"tenant") == 6


def test_nothing_is_stored_when_it_is_off() -> None:
    for sizes in ({"max_cached_prompts": 0}, {"enabled": False}):
        engine = _engine(**sizes)
        _run(engine, 6)
        _run(engine, 6)
        counters = engine.scheduler.metrics()
        assert (counters.prompt_hits, counters.cached_prompts, counters.copied_blocks) == (0, 0, 0)


def test_prompts_shorter_than_the_least_are_not_kept() -> None:
    engine = _engine(min_cached_prompt_tokens=6)
    for length in (5, 6):
        _run(engine, length)
    assert engine.scheduler.metrics().cached_prompts == 1
    assert _computed(engine, 5) == 1 and _computed(engine, 6) == 0


def test_the_least_recently_used_prompt_goes_first_and_a_hit_is_a_use() -> None:
    engine = _engine(max_cached_prompts=2)
    for length in (5, 6, 5, 7):  # 6 is the oldest when 7 comes
        _run(engine, length)
    assert engine.scheduler.metrics().prompt_evictions == 1
    assert _computed(engine, 5) == 0 and _computed(engine, 7) == 0
    assert _computed(engine, 6) == 1, "its tail is still there"


def test_a_referenced_entry_is_not_evicted() -> None:
    """In one plan the only slot is read by a hit, and a prompt that ends gets none."""
    engine = _engine(max_cached_prompts=1)
    _run(engine, 5)
    before = len(engine.plans)
    engine.add(PROMPT[:5], 3)
    engine.add(PROMPT[1:8], 3)
    engine.drain()
    shard = engine.plans[before].shards[0]
    assert shard.source_slots.tolist() == [1, 0] and shard.target_slots.tolist() == [0, 0]
    assert engine.scheduler.metrics().prompt_evictions == 0


def test_a_hit_whose_tail_copy_does_not_fit_gives_the_copy_up() -> None:
    """Five blocks: four of the prompt and the copy of its tail, which the request itself needs."""
    engine = _engine(num_blocks=5)
    _run(engine, 18)
    request = engine.add(PROMPT[:18], 3)
    engine.drain()
    assert request.num_cached_tokens == 16 and engine.scheduler.metrics().refusals == 0


def test_a_prompt_for_whose_tail_no_block_is_free_is_not_kept() -> None:
    engine = _engine(num_blocks=5)
    engine.add(PROMPT[:18], 3)
    engine.step()
    counters = engine.scheduler.metrics()
    assert (counters.cached_prompts, counters.copied_blocks, counters.live) == (0, 0, 5)
    engine.drain()


def test_equal_prompts_that_arrive_together_prefill_the_tail_once_too(engine: Engine) -> None:
    requests = [engine.add(PROMPT[:18], 4) for _ in range(3)]
    engine.drain()
    assert [request.num_cached_tokens for request in requests] == [0, 18, 18]
    assert engine.device.num_computed == 18 + 3 * 3


@pytest.mark.parametrize(("length", "cached"), [(18, 17), (17, 16), (16, 12), (2, 1)])
def test_choices_of_a_request_share_the_partial_tail_without_a_cache_of_prompts(length: int, cached: int) -> None:
    engine = _engine(max_cached_prompts=0)
    requests = [engine.add(PROMPT[:length], 5, num_choices=3) for _ in range(3)]
    engine.drain()
    assert [request.num_cached_tokens for request in requests] == [0, cached, cached]


def test_choices_append_to_copies_of_the_tail_of_their_own(engine: Engine) -> None:
    rows = [engine.add(PROMPT[:6], 2, num_choices=3) for _ in range(3)]
    engine.step()
    engine.step()
    table = engine.cache.blocks.tables[0]
    assert len({int(table[row.slot, 0]) for row in rows}) == 1
    assert len({int(table[row.slot, 1]) for row in rows}) == 3
    engine.drain()


def test_a_prompt_that_was_preempted_and_resumed_hits_like_any_other() -> None:
    engine = _engine(num_blocks=6, max_num_seqs=2)
    requests = [engine.add(PROMPT[i : i + 8], 12) for i in range(2)]
    engine.drain()
    assert sum(request.num_preemptions for request in requests) > 0


def test_what_a_dropped_request_has_stored_is_served(engine: Engine) -> None:
    request = engine.add(PROMPT[:6], 3)
    engine.step()
    engine.scheduler.abort(request.id)
    engine.drain()
    assert _computed(engine, 6) == 0


def test_a_step_of_repeats_alone_has_rows_and_no_tokens(engine: Engine) -> None:
    _run(engine, 6)
    before = len(engine.plans)
    for _ in range(3):
        engine.add(PROMPT[:6], 3)
    engine.drain()
    shard = engine.plans[before].shards[0]
    assert (shard.num_rows, shard.num_tokens, shard.samples.tolist()) == (3, 0, [1, 1, 1])


def test_books_are_right_while_copies_wait_for_their_plan_and_name_their_pools() -> None:
    """A repeat holds a tail, a hidden state and a snapshot until then."""
    engine = _engine(max_snapshots=4)
    _run(engine, 6)
    cache = engine.cache
    assert cache.admit(engine.add(PROMPT[:6], 3), 1) == 6
    cache.check_invariants()
    assert (
        [copy.pool for copy in cache.take_transfers().copies_before] == [0, 1] and cache.states and cache.prompts.slots
    )
    assert cache.numbered_pools() == [(0, cache.pools[0]), (1, cache.states.pool), (2, cache.prompts.slots)]
