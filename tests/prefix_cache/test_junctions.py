"""Recurrent models: a row leaves a snapshot where others part from the prefix that it computes, and in its answer."""

import pytest

from ferrum_jax.core.request import Request
from tests.scheduling.fake_device import Engine

BLOCK = 4
SHARED = [(i * i + i // 5) % 5 for i in range(64)]


def _engine(**sizes) -> Engine:
    return Engine(
        **({"num_blocks": 200, "max_num_seqs": 4, "max_snapshots": 16, "max_num_batched_tokens": 64} | sizes),
        max_model_len=128,
    )


def _own(stem: int, length: int = 9) -> list[int]:
    """Tokens in which no two stems begin alike."""
    return [stem % 5, stem // 5, *((stem * i) % 5 for i in range(length - 2))]


def _all_cached(engine: Engine, prompts: list[list[int]]) -> list[int]:
    """The same of prompts that wait together."""
    requests = [engine.add(prompt, 2) for prompt in prompts]
    engine.drain()
    return [request.num_cached_tokens for request in requests]


@pytest.mark.parametrize("budget", [64, 128, 20, 6])
@pytest.mark.parametrize("max_cached_prompts", [0, 4])
def test_prompts_that_come_in_turn_hit_their_prefix_from_the_third_on(budget, max_cached_prompts):
    engine = _engine(max_num_batched_tokens=budget, max_cached_prompts=max_cached_prompts)
    found = [engine.hit(SHARED[:40] + _own(stem)) for stem in range(5)]
    assert found[0] == 0 and found[2:] == [40] * 3


@pytest.mark.parametrize("budget", [64, 20, 6])
def test_prompts_that_wait_together_hit_their_common_prefix_from_the_second_on(budget):
    engine = _engine(max_num_batched_tokens=budget)
    assert _all_cached(engine, [SHARED[:40] + _own(stem) for stem in range(5)]) == [0] + [40] * 4


def test_every_place_where_waiting_prompts_part_has_a_snapshot():
    """All share 12 tokens, two groups 28 and 44."""
    engine = _engine(max_num_seqs=2, max_num_batched_tokens=128)
    group, deeper = SHARED[:28], SHARED[:44]
    prompts = [deeper + _own(1), deeper + _own(2), group + _own(3), SHARED[:12] + _own(4), group + _own(5)]
    assert _all_cached(engine, prompts) == [0, 44, 28, 12, 28]


def test_prompts_that_share_nothing_are_not_cut_for_each_other():
    engine = _engine(max_num_batched_tokens=200)
    for stem in range(3):
        engine.add(_own(stem, 50), 2)
    engine.drain()
    assert [plan.shards[0].counts.tolist() for plan in engine.plans[:2]] == [[48] * 3, [2] * 3]


def test_who_takes_no_hits_parts_from_nothing():
    engine = _engine()
    engine.add(SHARED[:50], 2)
    engine.add(SHARED[:20] + _own(1), 2, takes_hits=False)
    engine.step()
    assert engine.plans[0].shards[0].counts[0] == 48
    engine.drain()


def test_a_junction_leaves_the_queue_with_its_request():
    engine = _engine()
    first = engine.add(SHARED[:50], 2)
    second = engine.add(SHARED[:20] + _own(1), 2)
    engine.scheduler.abort(second.id)
    engine.step()
    assert first.num_computed == 48
    engine.drain()


# -- answers ---------------------------------------------------------------------------------------------


def _turn(engine: Engine, prompt: list[int], max_tokens: int) -> Request:
    request = engine.add(prompt, max_tokens)
    engine.drain()
    return request


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_the_second_turn_of_a_chat_hits_the_answer_of_the_first(max_tokens):
    """All full blocks whose last token was computed, wherever the answer ended."""
    engine = _engine()
    first = _turn(engine, SHARED[:18], max_tokens)
    second = _turn(engine, [*first.token_ids, *_own(1)], 2)
    assert second.num_cached_tokens == (18 + max_tokens - 1) // BLOCK * BLOCK


def test_an_answer_that_ends_by_a_stop_id_is_hit_as_well():
    engine = _engine()
    first = engine.add(SHARED[:18], 40, stop_ids=[2], min_tokens=9)
    engine.drain()
    assert first.finish_reason == "stop"
    second = _turn(engine, [*first.token_ids, *_own(1)], 2)
    assert second.num_cached_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK


def test_a_row_that_decodes_costs_one_copy_for_each_block_and_one_snapshot():
    engine = _engine()
    request = engine.add(SHARED[:18], 42)
    engine.step()
    before = engine.cache.metrics()
    copied, snapshots = before.copied_blocks, before.snapshots
    engine.drain()
    after = engine.cache.metrics()
    assert after.copied_blocks - copied == (len(request.token_ids) - 1) // BLOCK - 18 // BLOCK
    assert after.snapshots - snapshots == 1


def test_at_most_half_as_many_rows_are_followed_as_there_are_snapshots():
    engine = _engine(max_num_seqs=4, max_snapshots=4)
    requests = [engine.add(_own(stem, 10), 20) for stem in range(4)]
    engine.drain()
    found = [engine.hit([*request.token_ids, 4, 4]) for request in requests]
    assert found[:2] == [28, 28], "the first two"
    assert max(found[2:]) <= 8


@pytest.mark.parametrize("max_snapshots", [0, 1])
def test_without_room_for_a_snapshot_of_answers_none_is_made(max_snapshots):
    engine = _engine(max_snapshots=max_snapshots)
    first = _turn(engine, SHARED[:18], 20)
    assert engine.hit([*first.token_ids, *_own(1)]) == 16 * max_snapshots


def test_a_preempted_row_resumes_within_its_answer():
    """The other row takes the block that it had begun and ends."""
    engine = _engine(num_blocks=10, max_num_seqs=2)
    engine.add(SHARED[:11], 11)
    preempted = engine.add(_own(3, 9), 20)
    engine.drain()
    metrics = engine.cache.metrics()
    assert preempted.num_preemptions == 1 and (metrics.resumed_tokens, metrics.recomputed_tokens) == (16, 3)


def test_a_row_that_repeats_the_answer_of_another_leaves_its_snapshot_alone():
    engine = _engine()
    first = _turn(engine, SHARED[:18], 23)
    again = _turn(engine, SHARED[:18], 39)
    assert again.token_ids[: len(first.token_ids)] == first.token_ids
    assert engine.hit([*first.token_ids, *_own(1)]) == 40
    assert engine.hit([*again.token_ids, *_own(2)]) == 56
