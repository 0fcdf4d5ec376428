"""A long prompt leaves half of a step's prefill budget to those that wait, and gets back what they leave."""

import pytest

from ferrum_jax.core.request import Request
from ferrum_jax.io.ints import ceil_div
from tests.scheduling.fake_device import Engine

BUDGET = 256
LONG = 4000
KINDS = {"plain": {}, "windows": {"windows": (None, 64), "window_blocks": 96}, "recurrent": {"max_snapshots": 8}}


def _engine(**wishes) -> Engine:
    sizes = {"num_blocks": 1200, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": BUDGET}
    return Engine(**(sizes | {"max_model_len": LONG + 64} | wishes))


def _prompt(length: int, stem: int) -> list[int]:
    """No two stems share their first block."""
    return [stem % 5, stem // 5 % 5, stem // 25, *((i * i + i // 3) % 5 for i in range(length - 3))]


def _counts(engine: Engine, request: Request) -> list[int]:
    """The tokens of the request in each plan, as far as it has a row."""
    found = []
    for plan in engine.plans:
        (shard,) = plan.shards
        found += [count for slot, count in zip(shard.slots, shard.counts, strict=True) if slot == request.slot]
    return list(map(int, found))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_long", [1, 4])
def test_a_short_prompt_behind_long_ones_starts_within_two_steps(kind: str, num_long: int) -> None:
    engine = _engine(**({"num_blocks": 1200} | KINDS[kind]))
    for stem in range(num_long):
        engine.add(_prompt(LONG, stem), 2)
    for _ in range(3):
        engine.step()
    short = engine.add(_prompt(10, 9), 2)
    before = len(engine.plans)
    while not short.num_computed:
        engine.step()
    assert len(engine.plans) - before <= 2
    engine.drain()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_of_short_prompts_at_most_doubles_the_steps_of_a_long_one(kind: str) -> None:
    engine = _engine(**KINDS[kind])
    long = engine.add(_prompt(LONG, 0), 1)
    stems = iter(range(1, 125))
    engine.step()
    while long.finish_reason is None:
        while engine.scheduler.num_waiting < 4:  # as many tokens as are left for others, and more
            engine.add(_prompt(100, next(stems)), 1)
        engine.step()
    steps = next(
        i for i, plan in enumerate(engine.plans, 1) if (plan.shards[0].starts + plan.shards[0].counts).max() >= LONG
    )
    assert ceil_div(LONG, BUDGET) < steps <= 2 * ceil_div(LONG, BUDGET)
    engine.drain()


def test_a_long_prompt_takes_half_while_others_want_the_rest() -> None:
    engine = _engine()
    long = engine.add(_prompt(LONG, 0), 2)
    for stem in range(1, 20):
        engine.add(_prompt(100, stem), 1)
    for _ in range(6):
        engine.step()
    assert _counts(engine, long)[:6] == [128] * 6
    assert all(plan.num_tokens == BUDGET for plan in engine.plans)
    engine.drain()


def test_what_others_leave_goes_back_to_the_long_prompt() -> None:
    engine = _engine()
    long = engine.add(_prompt(LONG, 0), 2)
    engine.step()
    engine.add(_prompt(10, 1), 1)
    for _ in range(3):
        engine.step()
    assert _counts(engine, long) == [256, 246, 256, 256]
    engine.drain()


def test_requests_that_cannot_start_cost_a_long_prompt_nothing() -> None:
    """One has its blocks computed by the long one, the others find no row free."""
    engine = _engine(max_num_seqs=2)
    long = engine.add(_prompt(LONG, 0), 2)
    engine.add([*_prompt(LONG - 64, 0), 9], 1)
    for stem in range(1, 4):
        engine.add(_prompt(50, stem), 1)
    for _ in range(4):
        engine.step()
    assert _counts(engine, long) == [256] * 4
    engine.drain()


def test_a_prompt_that_a_step_can_compute_is_not_cut_for_those_behind_it() -> None:
    engine = _engine()
    first = engine.add(_prompt(200, 0), 2)
    engine.add(_prompt(200, 1), 2)
    engine.step()
    assert _counts(engine, first) == [200] and engine.plans[0].num_tokens == BUDGET
    engine.drain()
