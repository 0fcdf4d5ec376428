"""Several data shards under one scheduler: where requests go, and what stays as it is with one."""

import pytest

from tests.scheduling.fake_device import Engine, prompt_of


def _ran(engine: Engine, prompt: list[int], max_tokens: int = 2) -> int:
    """The shard on which a request alone ran to its end."""
    request = engine.add(prompt, max_tokens)
    engine.drain()
    return request.shard


def test_requests_without_a_prefix_go_where_the_fewest_rows_run() -> None:
    engine = Engine(num_shards=3)
    requests = [engine.add(prompt_of(6, stem), 8) for stem in range(5)]
    engine.step()
    assert [request.shard for request in requests] == [0, 1, 2, 0, 1]
    assert [plan.num_rows for plan in engine.plans[0].shards] == [2, 2, 1]
    engine.drain()


def test_a_request_goes_where_its_longest_prefix_is_cached() -> None:
    engine = Engine(num_shards=2, max_num_batched_tokens=32)
    short, long = prompt_of(8), prompt_of(16)
    assert _ran(engine, short[:5]) == 0
    busy = [engine.add(prompt_of(5, 1), 20), engine.add(prompt_of(5, 2), 2)]
    engine.step()
    assert [request.shard for request in busy] == [0, 1]
    longer = engine.add(long[:14], 2)
    engine.step()
    assert (longer.shard, longer.num_cached_tokens) == (0, 4)
    engine.drain()


def test_a_request_whose_prefix_is_on_a_shard_without_room_computes_it_on_another() -> None:
    engine = Engine(num_shards=2, max_num_seqs=1)
    assert _ran(engine, prompt_of(9)) == 0
    engine.add(prompt_of(5, 1), 20)
    engine.step()
    late = engine.add(prompt_of(9), 2)
    engine.step()
    assert (late.shard, late.num_cached_tokens) == (1, 0)
    engine.drain()


def test_nobody_overtakes_the_first_request_that_fits_on_no_shard() -> None:
    engine = Engine(num_shards=2, num_blocks=8, max_num_seqs=3, max_num_batched_tokens=32)
    for stem in range(2):
        engine.add(prompt_of(17, stem), 8)
    large, small = engine.add(prompt_of(20, 2), 2), engine.add(prompt_of(2, 3), 2)
    engine.step()
    assert (large.slot, small.slot, engine.scheduler.num_waiting) == (0, 0, 2)
    engine.drain()
    assert engine.scheduler.metrics().refusals


def test_equal_prompts_that_arrive_together_prefill_once_and_run_where_that_was() -> None:
    engine = Engine(num_shards=3, max_num_batched_tokens=32)
    requests = [engine.add(prompt_of(13), 3) for _ in range(4)]
    engine.drain()
    assert {request.shard for request in requests} == {0}
    assert [request.num_cached_tokens for request in requests] == [0, 12, 12, 12]
    assert [device.num_computed for device in engine.devices[1:]] == [0, 0]


def test_a_prompt_of_many_chunks_is_not_computed_again_on_an_idle_shard() -> None:
    engine = Engine(num_shards=2, max_num_batched_tokens=8)
    first, second = engine.add(prompt_of(33), 2), engine.add(prompt_of(33), 2)
    engine.drain()
    assert (first.shard, second.shard, second.num_cached_tokens) == (0, 0, 32)


def test_a_preempted_request_may_come_back_on_another_shard() -> None:
    engine = Engine(num_shards=2, num_blocks=6, max_num_seqs=2)
    stays, _, moves = (engine.add(prompt_of(9, stem), count) for stem, count in ((1, 12), (2, 2), (3, 12)))
    engine.step()
    assert (stays.shard, moves.shard) == (0, 0)
    engine.drain()
    assert (stays.num_preemptions, moves.num_preemptions) == (0, 1)
    assert (stays.shard, moves.shard) == (0, 1)


def test_a_request_that_no_shard_can_hold_is_refused() -> None:
    engine = Engine(num_shards=2, num_blocks=6, max_num_seqs=2)
    with pytest.raises(ValueError, match="needs 8 blocks of 4 tokens and the whole pool has 6"):
        engine.add(prompt_of(20), 12)
    assert _ran(engine, prompt_of(9)) == 0
    assert engine.scheduler.pin(engine.cache.keys_of(engine.requests[0])) == 2
    large = engine.add(prompt_of(18, 1), 5)
    engine.step()
    assert large.shard == 1, "of the first shard's blocks too few are not pinned"
    engine.scheduler.unpin()
    engine.drain()


def test_counters_and_gauges_are_those_of_all_shards() -> None:
    engine = Engine(num_shards=2)
    for stem in range(4):
        engine.add(prompt_of(9, stem), 3)
    engine.drain()
    parts, whole = [cache.metrics() for cache in engine.caches], engine.scheduler.metrics()
    assert whole.lookups == 4 and all(part.lookups for part in parts)
    assert whole.cached + whole.clean == 2 * 32 and whole.cached == sum(part.cached for part in parts)
    assert whole.enabled is True and whole.block_size == 4
