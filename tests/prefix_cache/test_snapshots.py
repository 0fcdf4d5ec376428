"""Recurrent state: a prefix is resumed where a snapshot was taken and nowhere else, and never from another's state."""

import pytest

from ferrum_jax.core.kv_cache.snapshots import StateSlots
from ferrum_jax.core.kv_cache.transfers import Transfers
from tests.scheduling.fake_device import Engine

PROMPT = [(i * i + i // 5) % 5 for i in range(40)]


def _engine(**sizes) -> Engine:
    return Engine(**({"num_blocks": 40, "max_num_seqs": 2, "max_snapshots": 8, "max_num_batched_tokens": 16} | sizes))


def test_a_hit_ends_where_a_prefill_chunk_ended_at_a_block_boundary() -> None:
    """Chunks of 16, 16 and 4 tokens, then the tail of 2."""
    engine = _engine()
    assert engine.hit(PROMPT[:38]) == 0
    assert [int(plan.shards[0].counts[0]) for plan in engine.plans[:4]] == [16, 16, 4, 2]
    assert engine.hit([*PROMPT[:38], 9, 9, 9]) == 36
    assert engine.hit([*PROMPT[:35], 9, 9, 9]) == 32
    assert engine.hit([*PROMPT[:31], 9, 9, 9]) == 16


def test_a_snapshot_serves_only_its_exact_length() -> None:
    engine = _engine()
    engine.hit(PROMPT[:16])
    assert engine.hit([*PROMPT[:12], 9, 9]) == 0, "its blocks are here, but no state after 12 tokens"
    assert engine.hit([*PROMPT[:16], 9]) == 16


def test_at_length_0_the_state_is_reset_and_no_request_sees_that_of_another() -> None:
    """The device checks each row's state: slots are used again and again by requests with other tokens."""
    engine = _engine(max_num_seqs=3, max_snapshots=1)
    for stem in range(4):
        for length in (5, 8, 13):
            engine.add([stem] * length, 6)
    engine.drain()


@pytest.mark.parametrize("length", [16, 19, 37])
def test_a_repeat_of_a_cached_prompt_resumes_from_its_last_snapshot(length: int) -> None:
    engine = _engine(max_cached_prompts=4)
    engine.hit(PROMPT[:length], 1)
    before = engine.device.num_computed
    assert engine.hit(PROMPT[:length], 1) == length and engine.device.num_computed == before
    assert engine.hit(PROMPT[:length], 5) == length


def test_choices_of_a_request_share_the_state_at_the_end_of_the_prompt() -> None:
    engine = _engine(max_num_seqs=4, max_cached_prompts=4)
    requests = [engine.add(PROMPT[:18], 8, num_choices=3) for _ in range(3)]
    engine.drain()
    assert [request.num_cached_tokens for request in requests] == [0, 18, 18]


def test_without_a_hidden_state_a_tail_is_not_resumed_one_token_before_its_end() -> None:
    engine = _engine(max_cached_prompts=0)
    assert engine.hit(PROMPT[:18]) == 0
    assert engine.hit(PROMPT[:18]) == 16


def test_a_preempted_row_resumes_from_its_own_snapshots() -> None:
    engine = _engine(num_blocks=9, max_num_batched_tokens=8)
    requests = [engine.add(PROMPT[:12], 16), engine.add([4, *PROMPT[21:32]], 16)]
    engine.drain()
    assert requests[1].num_preemptions and engine.cache.metrics().resumed_tokens


def test_the_least_recently_used_snapshot_goes_first_and_bytes_are_counted() -> None:
    engine = _engine(max_num_seqs=1, max_snapshots=2)
    prompts = [[stem] * 8 for stem in range(4)]
    for prompt in prompts:
        engine.hit(prompt)
    metrics = engine.cache.metrics()
    assert (metrics.snapshots, metrics.snapshot_bytes, metrics.snapshot_evictions) == (2, 2000, 2)
    assert [engine.hit([*prompt, 4]) for prompt in reversed(prompts)] == [8, 8, 0, 0]


def test_equal_prompts_that_arrive_together_wait_for_the_snapshot_and_hit_it() -> None:
    engine = _engine(max_num_seqs=3)
    requests = [engine.add([*PROMPT[:16], stem], 3) for stem in range(3)]
    engine.drain()
    assert [request.num_cached_tokens for request in requests] == [0, 16, 16]


def test_a_cache_that_is_off_keeps_no_snapshot() -> None:
    engine = _engine(enabled=False)
    assert [engine.hit(PROMPT), engine.hit(PROMPT)] == [0, 0]
    assert engine.cache.metrics().snapshots == 0


def test_windows_and_recurrent_state_resume_at_the_longest_position_that_suits_both() -> None:
    engine = _engine(windows=(None, 6))
    engine.hit(PROMPT[:36])
    keys = engine.cache.keys_of(engine.requests[0])
    pool = engine.cache.pools[1]
    for id in [id for id, key in pool.keyed() if key != keys[8]]:
        pool.retain(id)
    pool.release(pool.take(pool.num_free))  # evicts the window's last block
    assert pool.find(keys[8]) == 0
    for id, _ in pool.keyed():
        pool.release((id,))
    assert engine.hit([*PROMPT[:36], 9]) == 32


def test_a_followed_row_whose_snapshot_lost_its_key_publishes_the_next() -> None:
    """An equal row beside it ended for logits that are not finite."""
    slots, transfers = StateSlots(max_num_seqs=1, max_snapshots=4, copy_pool=1, slot_bytes=1), Transfers()
    slots.enter(1, 0, transfers)
    for end in (4, 8):
        slots.follow(1, end, transfers)
        slots.publish(1, end, lambda count: bytes([count]))
        slots.pool.check_invariants(dict.fromkeys(slots.holders(), 1))
        if end == 4:
            assert slots.pool.unkey(bytes([4]))
    assert slots.pool.num_keyed == 1 and slots.pool.find(bytes([8])) and slots.pool.num_live == 2
