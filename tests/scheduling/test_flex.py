"""FLEX requests take the padding of others' steps, and give up rows and blocks to who needs them."""

import random

import pytest

from ferrum_jax.core.request import FLEX
from ferrum_jax.core.scheduler.flex import StepSizes
from tests.scheduling.fake_device import Engine, prompt_of

STEPS = StepSizes(decode=(1, 2, 4, 8), mixed=(16, 32, 64))
KINDS = {
    "plain": {},
    "windows": {"windows": (None, 16)},
    "recurrent": {"max_snapshots": 4},
    "shards": {"num_shards": 2},
    "drafts": {"drafts": "right"},
}


def engine_of(**wishes) -> Engine:
    sizes = {"num_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 64, "steps": STEPS}
    return Engine(**(sizes | wishes))


def test_they_have_an_eighth_of_the_others_tokens_within_the_padding():
    def spare(num_tokens: int, *, decodes: bool) -> list[int]:
        return [STEPS.spare(num_tokens, decodes=decodes, step=step) for step in range(8)]

    assert [sum(spare(n, decodes=True)) for n in (1, 3, 5, 8, 9, 64, 65)] == [0, 3, 5, 0, 9, 0, 0]
    assert (
        spare(40, decodes=False) == [5] * 8
        and spare(31, decodes=False) == [1] * 8
        and spare(16, decodes=False) == [0] * 8
    )
    assert spare(3, decodes=False) == [13] * 8, "the smallest step of all takes as long with fewer"
    assert StepSizes().spare(3, decodes=True, step=0) == 0


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(4, 16), (8, 16), (9, 32), (16, 32)])
def test_alone_they_have_small_steps_for_which_nobody_waits_long(num_rows, num_tokens):
    engine = engine_of(max_num_seqs=num_rows)
    for stem in range(4):
        engine.add(prompt_of(20, stem), 5, priority=FLEX)
    engine.step()
    assert engine.plans[0].shards[0].num_tokens == num_tokens
    engine.drain()


def test_beside_three_that_decode_one_row_is_free():
    engine = engine_of()
    live = [engine.add(prompt_of(4, stem), 30) for stem in range(3)]
    engine.step()
    for stem in range(3, 6):
        engine.add(prompt_of(4, stem), 30, priority=FLEX)
    for _ in range(10):
        engine.step()
    later = {tuple(plan.shards[0].counts.tolist()) for plan in engine.plans[2:]}
    assert later == {(1, 1, 1), (1, 1, 1, 1)}, "steps of one token a row, at most four as three are padded to"
    assert all(request.num_preemptions == 0 for request in live)
    engine.drain()


def test_their_prompts_are_computed_in_the_padding_of_prompts():
    engine = engine_of()
    flex = engine.add(prompt_of(40, 1), 4, priority=FLEX)
    engine.add(prompt_of(20, 2), 4)
    engine.step()
    assert engine.plans[0].shards[0].num_tokens == 20 + flex.num_computed and flex.num_computed in (2, 3)
    engine.drain()


@pytest.mark.parametrize("lacks", ["rows", "blocks"])
def test_who_comes_has_a_row_in_the_next_step(lacks):
    engine = engine_of(max_num_seqs=2 if lacks == "rows" else 8, num_blocks=60 if lacks == "rows" else 12)
    flex = [engine.add(prompt_of(20, stem), 20, priority=FLEX) for stem in range(2)]
    while not all(request.slot for request in flex):
        engine.step()
    live = engine.add(prompt_of(16, 4), 8)
    engine.step()
    assert live.slot and live.num_computed == 16
    assert [bool(request.slot) for request in flex] == [True, False], "the latest gave way, and no other"
    engine.drain()


@pytest.mark.parametrize("kind", ["plain", "windows", "recurrent"])  # elsewhere it matters who else is there
@pytest.mark.parametrize("seed", range(4))
def test_others_end_in_the_steps_that_they_would_end_in_alone(kind, seed):
    def trace(with_flex: bool) -> list[tuple[int, int]]:
        rng, engine = random.Random(seed), engine_of(**KINDS[kind])
        live, ends = [], []
        for _ in range(60):
            arrives, flex = rng.random() < 0.2, rng.random() < 0.4
            prompt, length = prompt_of(rng.randrange(1, 30), rng.randrange(9)), rng.randrange(1, 20)
            salt = str(rng.random()).encode()  # nobody hits what another computed
            if arrives:
                live.append(engine.add(prompt, length, salt=salt))
            elif flex and with_flex:
                engine.add(prompt, length, salt=salt, priority=FLEX)
            engine.step()
            ends.append(sum(len(request.token_ids) for request in live))
        engine.drain()
        return ends

    assert trace(with_flex=True) == trace(with_flex=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_all_end_as_they_would_alone_however_few_blocks_there_are(kind, seed):
    rng = random.Random(seed)
    engine = engine_of(**{"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 16, **KINDS[kind]})
    for _ in range(80):
        if rng.random() < 0.3:
            priority = FLEX if rng.random() < 0.5 else 0
            engine.add(prompt_of(rng.randrange(1, 40), rng.randrange(4)), rng.randrange(1, 20), priority=priority)
        engine.step()
    engine.drain()
