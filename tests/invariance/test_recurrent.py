"""Recurrent layers: the reference's tokens and equal bits, whatever is reused and however a row is cut into steps."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.startup.build_engine import build_engine
from tests.engine.test_goldens import check_equal, golden_prompts
from tests.golden_table import goldens
from tests.invariance.test_bits import bits
from tests.support import INVARIANT, SMALL, finish, run, small_llm

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
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
    prompts, tokens, best = golden_prompts(name)
    llm = small_llm(name, base)
    config = dataclasses.replace(llm.config, max_num_batched_tokens=budget, num_blocks=num_blocks)
    engine = build_engine(llm.loaded, config, None, fill=math.nan)
    for used in (0, 3):
        params = dataclasses.replace(GREEDY, max_tokens=64 - used, n=2)
        ids = [
            engine.add([*prompt.tolist(), *said[:used].tolist()], params)
            for prompt, said in zip(prompts, tokens, strict=True)
        ]
        outputs = finish(engine)
        for choice in range(2):
            found = [outputs[id].outputs[choice] for id in ids]
            check_equal(found, [t[used:] for t in tokens], [b[used:] for b in best])
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
    prompts, tokens, best = golden_prompts(golden)
    llm = small_llm(golden, base)
    # five snapshots are of the prompts that came last
    plenty, few = {"num_blocks": 80, "max_state_snapshots": 5}, {"num_blocks": 18, "max_num_batched_tokens": 23}
    for sizes in (plenty, few, {"enable_prefix_caching": False}):
        config = dataclasses.replace(llm.config, **sizes)
        engine = build_engine(llm.loaded, config, None, fill=math.nan)
        for used in (0, 0, 3):
            params = dataclasses.replace(GREEDY, max_tokens=64 - used)
            ids = [engine.add([*p.tolist(), *t[:used].tolist()], params) for p, t in zip(prompts, tokens, strict=True)]
            outputs = finish(engine)
            check_equal([outputs[i] for i in ids], [t[used:] for t in tokens], [b[used:] for b in best])
        metrics = engine.scheduler.metrics()
        assert sizes is not plenty or metrics.hits
        assert config.enable_prefix_caching or not metrics.hits
        assert bool(metrics.preemptions) == (sizes is few)
        assert bool(metrics.snapshots) == config.enable_prefix_caching


@pytest.mark.parametrize("golden", ["qwen3_next", pytest.param("granitemoehybrid", marks=LONG)])
def test_cuts_hits_and_preemption_do_not_change_a_bit(golden):
    """Token by token on the CPU, for the sequential form knows no tiles."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=20)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(6, 150, n).tolist() for n in (1, 17, 70, 33, 5)]
    llm = small_llm(golden, INVARIANT)
    expected = [bits(run(llm, [prompt], params, enable_prefix_caching=False)[0]) for prompt in prompts]
    for budget, num_blocks in ((64, 80), (5, 80), (64, 6)):
        config = dataclasses.replace(llm.config, max_num_batched_tokens=budget, num_blocks=num_blocks)
        engine = build_engine(llm.loaded, config, None, fill=math.nan)
        for _ in range(2):
            ids = [engine.add(prompt, params) for prompt in prompts]
            outputs = finish(engine)
            assert [bits(outputs[id]) for id in ids] == expected
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
