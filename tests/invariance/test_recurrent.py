"""Recurrent layers: the reference's tokens and equal bits, whatever is reused and however a row is cut into steps."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.engine.test_goldens import check_again, golden_prompts
from tests.golden_table import goldens
from tests.support import INVARIANT, SMALL, answers, fresh_engine, requests_of, run, small_llm
from tests.support import logprobs_of as bits

pytestmark = pytest.mark.slow
RECURRENT = goldens("recurrent", "slow", "long")
LONG = pytest.mark.long
TILES = dataclasses.replace(SMALL, max_num_batched_tokens=64)  # tiles of 16 to 64 tokens; SMALL has tiles of 16


@pytest.mark.parametrize(
    ("name", "base", "budget", "num_blocks"),
    [
        *(("qwen3_next", TILES, budget, num_blocks) for budget, num_blocks in ((64, 80), (50, 80), (7, 80), (64, 18))),
        *(("qwen3_next_raw", SMALL, budget, num_blocks) for budget, num_blocks in ((16, 80), (7, 80), (16, 18))),
    ],
)
def test_greedy_tokens_equal_the_reference_in_chunks_on_hits_and_after_preemption(name, base, budget, num_blocks):
    """Every prompt twice at once and then again, with some of its tokens; what nobody wrote holds NaN."""
    engine = fresh_engine(small_llm(name, base), max_num_batched_tokens=budget, num_blocks=num_blocks)
    check_again(engine, *golden_prompts(name), n=2)
    metrics = engine.scheduler.metrics()
    assert metrics.hits and metrics.snapshots and metrics.prompt_hits
    assert bool(metrics.preemptions) == (num_blocks == 18)


@pytest.mark.parametrize(
    ("golden", "base"),
    [
        *(pytest.param(name, INVARIANT, id=name) for name in goldens("recurrent", "slow")),
        *(pytest.param(name, INVARIANT, id=name, marks=LONG) for name in goldens("recurrent", "long")),
        *(pytest.param(name, TILES, id=f"{name}-tiles", marks=LONG) for name in RECURRENT),
    ],
)
def test_tokens_are_the_references_where_blocks_and_snapshots_are_few(golden, base):
    """Every prompt, then again, then with some of its tokens; what nobody wrote holds NaN."""
    # five snapshots are of the prompts that came last
    plenty, few = {"num_blocks": 80, "max_state_snapshots": 5}, {"num_blocks": 18, "max_num_batched_tokens": 23}
    for sizes in (plenty, few, off := {"enable_prefix_caching": False}):
        engine = fresh_engine(small_llm(golden, base), **sizes)
        check_again(engine, *golden_prompts(golden), used=(0, 0, 3))
        metrics = engine.scheduler.metrics()
        assert sizes is not plenty or metrics.hits
        assert sizes is not off or not metrics.hits
        assert bool(metrics.preemptions) == (sizes is few)
        assert bool(metrics.snapshots) == (sizes is not off)


@pytest.mark.parametrize("golden", ["qwen3_next", pytest.param("granitemoehybrid", marks=LONG)])
def test_cuts_hits_and_preemption_do_not_change_a_bit(golden):
    """Token by token on the CPU, for the sequential form knows no tiles."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=20)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(6, 150, n).tolist() for n in (1, 17, 70, 33, 5)]
    llm = small_llm(golden, INVARIANT)
    expected = [bits(run(llm, [prompt], params, enable_prefix_caching=False)[0]) for prompt in prompts]
    for budget, num_blocks in ((64, 80), (5, 80), (64, 6)):
        engine = fresh_engine(llm, max_num_batched_tokens=budget, num_blocks=num_blocks)
        for _ in range(2):
            assert [bits(output) for output in answers(engine, requests_of(prompts, params))] == expected
        metrics = engine.scheduler.metrics()
        assert bool(metrics.hits) == (num_blocks == 80)
        assert bool(metrics.preemptions + metrics.refusals) == (num_blocks == 6)


def test_states_are_written_in_place_in_every_bucket():
    loaded = small_llm("qwen3_next", TILES).loaded
    for executable in (*loaded.executables.forwards.values(), loaded.executables["copy_blocks"]):
        text = executable.as_text()
        for state in jax.tree.leaves(loaded.layout.pools.states[0]):
            shape = re.escape(f"f32[{','.join(map(str, state.shape))}]")
            assert re.search(shape, text) and not re.search(shape + r"\S* copy\(", text)
