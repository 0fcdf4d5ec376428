"""The scheduler's promises, one sentence each, over a fake device that checks every read."""

import numpy as np
import pytest

from ferrum_jax.core.plan import StepPlan
from tests.scheduling.fake_device import Engine, expected_tokens, prompt_of


@pytest.fixture
def engine() -> Engine:
    return Engine()


def _rows(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, samples) of each row."""
    shard = plan.shards[0]
    return list(zip(*(a.tolist() for a in (shard.slots, shard.starts, shard.counts, shard.samples)), strict=True))


def test_the_next_step_is_planned_before_the_token_of_the_last_is_known(engine: Engine) -> None:
    request = engine.add(prompt_of(6), 5)
    engine.step()
    engine.step()
    assert [_rows(plan) for plan in engine.plans] == [[(1, 0, 6, 1)], [(1, 6, 1, 1)]]
    assert len(request.token_ids) == 7 and request.num_computed == 7


def test_a_row_is_not_planned_beyond_the_token_in_flight_that_ends_it(engine: Engine) -> None:
    engine.add(prompt_of(3), 2)
    engine.drain()
    assert [_rows(plan) for plan in engine.plans] == [[(1, 0, 3, 1)], [(1, 3, 1, 1)]]


def test_a_stop_id_ends_a_request_and_drops_what_is_in_flight_for_it(engine: Engine) -> None:
    expected = expected_tokens(prompt_of(6), 40, frozenset({2}), 0)
    request = engine.add(prompt_of(6), 34, stop_ids=[2])
    engine.drain()
    assert (request.finish_reason, request.stop_reason) == ("stop", 2)
    assert request.token_ids.tolist() == expected
    assert len(engine.plans) == len(expected) - 6 + 1, "one step was in flight for nothing"


def test_min_tokens_holds_a_stop_id_back() -> None:
    alone = expected_tokens(prompt_of(6), 60, frozenset(), 0)[6:]
    first = alone.index(2)
    engine = Engine()
    request = engine.add(prompt_of(6), 50, stop_ids=[2], min_tokens=first + 1)
    engine.drain()
    assert len(request.token_ids) - 6 == alone.index(2, first + 1) + 1


def test_decodes_come_first_and_a_step_mixes_both() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(prompt_of(5), 20)
    engine.step()
    engine.add(prompt_of(30, stem=1), 4)
    engine.step()
    engine.step()
    assert [row[1:] for row in _rows(engine.plans[1])] == [(5, 1, 1), (0, 7, 0)]
    assert [row[1:] for row in _rows(engine.plans[2])] == [(6, 1, 1), (7, 7, 0)]
    engine.drain()


def test_a_long_prompt_is_cut_into_exact_chunks() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add(prompt_of(27), 2)
    engine.drain()
    assert [row[1:] for plan in engine.plans for row in _rows(plan)] == [
        (0, 8, 0),
        (8, 8, 0),
        (16, 8, 0),
        (24, 3, 1),
        (27, 1, 1),
    ]


def test_prefill_never_starves_decode_nor_the_reverse() -> None:
    engine = Engine(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=64)
    for stem in range(3):
        engine.add(prompt_of(4, stem), 30)
    late = engine.add(prompt_of(24, 3), 4)
    while late.num_prompt_tokens == len(late.token_ids):
        before = len(engine.plans)
        engine.step()
        rows = _rows(engine.plans[before])
        if late.slot:
            assert len(rows) == 4 or late.num_computed == 0, "a row got nothing in a step"
    engine.drain()


def test_no_step_exceeds_its_tokens_or_rows() -> None:
    engine = Engine(max_num_batched_tokens=10, max_num_seqs=3, num_blocks=64)
    for stem in range(8):
        engine.add(prompt_of(3 + 5 * stem, stem), 6)
    engine.drain()
    assert max(plan.shards[0].num_tokens for plan in engine.plans) == 10
    assert max(plan.shards[0].num_rows for plan in engine.plans) == 3


def test_requests_are_admitted_by_priority_and_then_by_arrival() -> None:
    engine = Engine(max_num_seqs=1)
    ids = [engine.add(prompt_of(3, stem), 2, priority=priority).id for stem, priority in enumerate([1, 0, 1, 0])]
    engine.drain()
    admitted = [request_id for plan in engine.plans for _, _, request_id in plan.admitted]
    assert admitted == [ids[1], ids[3], ids[0], ids[2]]


def test_five_requests_on_a_pool_for_two_all_finish_and_nothing_is_live_at_the_end() -> None:
    engine = Engine(num_blocks=12, max_num_seqs=5, max_num_batched_tokens=64)
    requests = [engine.add(prompt_of(8, stem), 16) for stem in range(5)]
    engine.drain()
    assert all(request.finish_reason == "length" for request in requests)
    counters = engine.scheduler.metrics()
    assert counters.preemptions == sum(request.num_preemptions for request in requests) > 0
    assert counters.live == 0 and engine.scheduler.num_running == 0
    assert engine.device.num_computed > 5 * 23, "each preempted one computes again"


def test_a_preempted_request_replays_mostly_from_its_own_blocks() -> None:
    engine = Engine(num_blocks=12, max_num_batched_tokens=64)
    engine.add(prompt_of(8), 9)
    second = engine.add(prompt_of(36, 1), 8)
    engine.drain()
    counters = engine.scheduler.metrics()
    assert second.num_preemptions == 1
    assert counters.resumed_tokens == 32, "all but the deepest block, which the other row took"
    assert counters.recomputed_tokens == 5
    assert second.num_cached_tokens == counters.hit_tokens == 0, "what a row finds of itself is no hit"


def test_the_latest_row_of_the_lowest_priority_is_preempted() -> None:
    engine = Engine(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=64)
    oldest, important, latest = (engine.add(prompt_of(8, stem), 12, priority=p) for stem, p in ((0, 1), (1, 0), (2, 1)))
    order = []
    while not engine.is_idle:
        before = [request.num_preemptions for request in (oldest, important, latest)]
        engine.step()
        after = [request.num_preemptions for request in (oldest, important, latest)]
        order += [index for index in range(3) if after[index] > before[index]]
    assert important.num_preemptions == 0 and order[0] == 2
    engine.drain()


def test_a_preempted_request_gets_its_token_in_flight_and_is_not_admitted_before() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(prompt_of(8), 12)
    second = engine.add(prompt_of(8, 1), 12)
    while not second.num_preemptions:
        known = len(second.token_ids)
        engine.step()
    assert len(second.token_ids) == known + 1 and second.slot == 0
    engine.drain()


def test_a_row_that_still_prefills_is_preempted_before_an_older_one_that_decodes() -> None:
    engine = Engine(num_blocks=12, max_num_batched_tokens=8)
    first = engine.add(prompt_of(5), 9)
    second = engine.add(prompt_of(40, 1), 4)
    for _ in range(5):
        engine.step()
    assert second.num_preemptions == 1
    assert len(second.token_ids) == second.num_prompt_tokens and not first.num_preemptions
    engine.drain()
    assert engine.scheduler.metrics().resumed_tokens > 0, "the chunks that were computed are found again"


def test_a_preempted_request_that_is_aborted_drops_its_token_in_flight() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=64)
    engine.add(prompt_of(8), 12)
    second = engine.add(prompt_of(8, 1), 12)
    for _ in range(5):
        engine.step()
    engine.dispatch()
    assert second.num_preemptions == 1, "position 12 needs a seventh block"
    known = second.token_ids[:]
    engine.scheduler.abort(second.id)
    assert second not in [request for request, _ in engine.commit()]
    assert second.token_ids == known
    engine.drain()


def test_a_request_that_does_not_fit_waits_without_stopping_the_decodes() -> None:
    engine = Engine(num_blocks=8)
    first = engine.add(prompt_of(8), 12)
    engine.step()
    engine.add(prompt_of(24, 1), 4)
    while first.finish_reason is None:
        plans = len(engine.plans)
        engine.step()
        assert engine.scheduler.num_waiting == 1 or first.finish_reason
        assert len(engine.plans) == plans + 1 or first.finish_reason or len(first.token_ids) >= 19
    engine.drain()
    assert engine.cache.counters.refusals > 0


def test_nothing_overtakes_the_first_that_waits() -> None:
    engine = Engine(num_blocks=8)
    engine.add(prompt_of(8), 12)
    engine.step()
    large = engine.add(prompt_of(24, 1), 4)
    small = engine.add(prompt_of(2, 2), 2)
    while not large.slot:
        assert not small.slot
        engine.step()
    engine.drain()


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (60, 10, r"60 prompt \+ 10 new tokens, 70 in all, more than max_model_len, 64"),
        (30, 20, r"of 30 prompt and 20 new tokens needs 13 blocks of 4 tokens and the whole pool has 12"),
        (0, 3, r"has 0 prompt tokens"),
        (5, 0, r"has 5 prompt tokens and may have 5 in all"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(length: int, max_tokens: int, message: str) -> None:
    engine = Engine(num_blocks=12)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt_of(length), max_tokens)
    assert not engine.scheduler.has_unfinished


def test_a_request_may_fill_the_whole_pool() -> None:
    engine = Engine(num_blocks=12)
    request = engine.add(prompt_of(30), 19)  # the 49th token is sampled, never computed
    engine.drain()
    assert len(request.token_ids) == 49 and engine.scheduler.metrics().peak_live == 12


def test_a_budget_that_cannot_hold_one_token_of_every_row_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3, less than max_num_seqs, 4"):
        Engine(max_num_batched_tokens=3, max_num_seqs=4)


def test_every_way_out_releases_everything_once() -> None:
    engine = Engine(max_num_seqs=2, num_blocks=64)
    ends = {name: engine.add(prompt_of(9, stem), 20) for stem, name in enumerate(["abort", "text", "length", "queued"])}
    engine.step()
    engine.step()
    assert engine.scheduler.abort(ends["abort"].id) is ends["abort"]
    assert engine.scheduler.abort(ends["queued"].id) is ends["queued"]
    engine.scheduler.finish(ends["text"], "stop", "text")
    assert engine.scheduler.abort(ends["abort"].id) is None, "it is not here any more"
    engine.drain()
    reasons = [(r.finish_reason, r.stop_reason) for r in ends.values()]
    assert reasons == [("abort", None), ("stop", "text"), ("length", None), ("abort", None)]


def test_a_stop_string_in_the_last_token_changes_only_the_reason(engine: Engine) -> None:
    request = engine.add(prompt_of(5), 1)
    engine.step()
    engine.step()
    assert request.finish_reason == "length"
    engine.scheduler.finish(request, "stop", "text")
    assert (request.finish_reason, request.stop_reason) == ("stop", "text")
    engine.drain()


def test_what_ended_is_dropped_even_when_its_slot_has_a_new_owner() -> None:
    engine = Engine(max_num_seqs=1)
    first = engine.add(prompt_of(5), 20)
    engine.step()
    engine.step()
    known = first.token_ids[:]
    engine.scheduler.abort(first.id)
    second = engine.add(prompt_of(7, 1), 4)
    engine.step()
    assert second.slot == 1 and first.token_ids == known and len(second.token_ids) == 7
    engine.drain()


def test_the_same_prompt_again_hits_and_saves_and_gives_the_same_tokens(engine: Engine) -> None:
    first = engine.add(prompt_of(18), 6)
    engine.drain()
    second = engine.add(prompt_of(18), 6)
    engine.drain()
    assert first.token_ids == second.token_ids
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    counters = engine.scheduler.metrics()
    assert (counters.hits, counters.misses, counters.saved_prefill_tokens, counters.missed_tokens) == (1, 1, 16, 20)


def test_generated_blocks_are_hit_too(engine: Engine) -> None:
    first = engine.add(prompt_of(6), 10)
    engine.drain()
    second = engine.add([*first.token_ids, 1], 3)
    engine.drain()
    assert second.num_cached_tokens == 12, "tokens 0 to 14 are computed, the last one never was"


def test_a_request_admitted_next_hits_the_blocks_of_the_step_in_flight(engine: Engine) -> None:
    engine.add(prompt_of(9), 4)
    engine.step()
    second = engine.add(prompt_of(9), 4)
    engine.step()
    assert second.num_cached_tokens == 8
    engine.drain()


def test_equal_prompts_that_arrive_together_prefill_once() -> None:
    engine = Engine(max_num_batched_tokens=64)
    rows = [engine.add(prompt_of(13), 8) for _ in range(3)]
    engine.step()
    assert engine.device.num_computed == 13 and engine.scheduler.num_waiting == 2
    engine.step()
    table = engine.cache.blocks.tables[0]
    assert all(np.array_equal(table[rows[0].slot, :3], table[row.slot, :3]) for row in rows[1:])
    assert [row.num_cached_tokens for row in rows] == [0, 12, 12]
    assert engine.scheduler.metrics().twins_merged == 0
    engine.drain()


def test_a_follower_waits_for_the_blocks_it_shares_not_for_the_request() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add([*prompt_of(16), *prompt_of(6, 1)], 2)
    follower = engine.add([*prompt_of(16), *prompt_of(3, 2)], 2)
    for _ in range(3):
        assert not follower.slot, "its blocks are not there"
        engine.step()
    assert [row[1:] for row in _rows(engine.plans[2])] == [(16, 5, 0), (16, 3, 1)], "beside the leader's last tokens"
    engine.drain()


def test_others_pass_a_request_that_waits_for_blocks() -> None:
    engine = Engine(max_num_batched_tokens=16, max_num_seqs=4)
    engine.add(prompt_of(24), 2)
    follower = engine.add(prompt_of(24), 2)
    engine.step()
    other = engine.add(prompt_of(3, 1), 2)
    engine.step()
    assert other.slot and not follower.slot, "the leader's last 8 tokens leave room for others"
    engine.drain()
    assert follower.num_cached_tokens == 20


def test_requests_that_wait_for_blocks_keep_no_more_row_slots_than_they_will_take() -> None:
    engine = Engine(max_num_batched_tokens=32, max_num_seqs=3)
    equal = [engine.add(prompt_of(13), 2) for _ in range(4)]
    other = engine.add(prompt_of(5, 1), 2)
    engine.step()
    assert [request.slot for request in [*equal, other]] == [1, 0, 0, 0, 0]
    engine.step()
    assert [bool(request.slot) for request in [*equal, other]] == [True, True, True, False, False]
    engine.drain()
    assert sorted(request.num_cached_tokens for request in equal) == [0, 12, 12, 12]


def test_when_the_leader_leaves_a_follower_takes_over_from_the_blocks_that_are_there() -> None:
    engine = Engine(max_num_batched_tokens=8)
    leader, follower, last = (engine.add(prompt_of(24), 2) for _ in range(3))
    engine.step()
    engine.scheduler.abort(leader.id)
    engine.step()
    assert follower.num_cached_tokens == 8 and not last.slot
    engine.drain()
    assert last.num_cached_tokens == 20 and engine.device.num_computed == 8 + 16 + 4 + 2


def test_a_preempted_leader_goes_on_from_its_own_blocks_before_its_followers() -> None:
    engine = Engine(num_blocks=14, max_num_batched_tokens=8)
    engine.add(prompt_of(7, 1), 12)  # its growth takes the leader's blocks
    engine.step()
    leader, follower = (engine.add(prompt_of(44), 2) for _ in range(2))
    while not leader.num_preemptions:
        engine.step()
    assert not follower.slot
    engine.drain()
    assert follower.num_cached_tokens == 40


def test_a_request_whose_prompt_is_computed_again_and_again_delays_nobody() -> None:
    """Blocks that are published already are hit at once, whoever computes them once more."""
    engine = Engine(max_num_batched_tokens=64, max_num_seqs=4)
    engine.add(prompt_of(13), 1)
    engine.drain()
    engine.add(prompt_of(13), 4, takes_hits=False)
    follower = engine.add(prompt_of(13), 4)
    engine.step()
    assert follower.slot and follower.num_cached_tokens == 12
    engine.drain()


def test_without_the_cache_nobody_waits_for_blocks() -> None:
    engine = Engine(max_num_batched_tokens=64, enabled=False)
    rows = [engine.add(prompt_of(12), 3) for _ in range(3)]
    engine.step()
    assert all(row.slot for row in rows) and engine.device.num_computed == 36
    engine.drain()


def test_what_a_dropped_step_computes_is_never_published(engine: Engine) -> None:
    request = engine.add(prompt_of(6), 20)
    while len(request.token_ids) < 8:
        engine.step()  # position 7, which fills block 1, is in flight now
    assert request.num_computed == 8
    engine.scheduler.abort(request.id)
    engine.drain()
    assert engine.scheduler.metrics().entries == 1


def test_a_request_that_takes_no_hits_computes_everything_and_publishes(engine: Engine) -> None:
    engine.add(prompt_of(10), 2)
    engine.drain()
    deaf = engine.add(prompt_of(14), 2, takes_hits=False)
    engine.drain()
    assert deaf.num_cached_tokens == 0 and engine.cache.counters.lookups == 1
    follower = engine.add(prompt_of(14), 2)
    engine.drain()
    assert follower.num_cached_tokens == 12


def test_an_idle_engine_keeps_its_cache(engine: Engine) -> None:
    engine.add(prompt_of(9), 2)
    engine.drain()
    assert engine.scheduler.schedule() is None
    assert engine.scheduler.metrics().cached == 2


@pytest.mark.parametrize("max_cached_prompts", [0, 8])
def test_reuse_never_makes_a_batch_smaller_nor_its_bucket_larger(max_cached_prompts: int) -> None:
    """Step by step: as many rows as without the cache, and no more tokens."""
    plans = []
    for enabled in (True, False):
        engine = Engine(
            max_cached_prompts=max_cached_prompts, enabled=enabled, num_blocks=60, max_num_batched_tokens=64
        )
        for _ in range(2):
            for tail in range(4):
                engine.add([*prompt_of(12), tail, tail], 6)
            first = len(engine.plans)
            engine.drain()
        plans.append([plan.shards[0] for plan in engine.plans[first:]])
    on, off = plans
    assert [shard.num_rows for shard in on] == [shard.num_rows for shard in off] == [4] * len(on)
    assert (
        all(a.num_tokens <= b.num_tokens for a, b in zip(on, off, strict=True)) and on[0].num_tokens < off[0].num_tokens
    )


def test_an_earlier_planned_write_never_lands_after_the_new_owners() -> None:
    """Blocks go from row to row behind windows, by preemption and by eviction; each has one writer at a time."""
    engine = Engine(num_blocks=14, windows=(None, 6), max_num_seqs=4, block_size=2, max_num_batched_tokens=9)
    for stem in range(12):
        engine.add(prompt_of(9 + stem % 5, stem), 10, priority=stem % 2)
    engine.drain()
    last: dict[tuple[int, int], tuple[int, int]] = {}  # of a block: the row that wrote it last, as slot and admission
    handed_over, admissions = 0, dict.fromkeys(range(5), 0)
    for plan in engine.plans:
        (shard,) = plan.shards
        for _, slot, _ in plan.admitted:
            admissions[slot] += 1
        writers: dict[tuple[int, int], tuple[int, int]] = {}
        for row, (slot, start, count) in enumerate(zip(shard.slots, shard.starts, shard.counts, strict=True)):
            for group, tables in enumerate(shard.block_tables):
                for id in tables[row, start // 2 : -(-(start + count) // 2)].tolist():
                    writer = int(slot), admissions[int(slot)]
                    assert writers.setdefault((group, id), writer) == writer, "two rows write a block in one step"
                    if start % 2 and tables[row, start // 2] == id:
                        assert last[group, id] == writer, "a row goes on in a block that another one wrote since"
        handed_over += sum(last.get(place, writer) != writer for place, writer in writers.items())
        last |= writers
    assert handed_over > 50 and engine.cache.metrics().preemptions and engine.cache.metrics().left_behind_blocks


def test_a_plan_keeps_its_arrays_when_the_books_go_on(engine: Engine) -> None:
    engine.add(prompt_of(9), 6)
    engine.step()
    before = [array.copy() for array in (engine.plans[0].shards[0].starts, engine.plans[0].shards[0].block_tables[0])]
    engine.drain()
    after = [engine.plans[0].shards[0].starts, engine.plans[0].shards[0].block_tables[0]]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_slot_record_is_ordered_at_each_admission() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=64)
    requests = [engine.add(prompt_of(8, stem), 12) for stem in range(2)]
    engine.drain()
    admitted = [entry for plan in engine.plans for entry in plan.admitted]
    for request in requests:
        times = sum(request_id == request.id for _, _, request_id in admitted)
        assert times == 1 + request.num_preemptions
    assert requests[1].num_preemptions and all(shard == 0 for shard, _, _ in admitted)
