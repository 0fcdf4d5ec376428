"""A model with sliding windows in some layers, in the engine: the reference's tokens, whatever is reused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.runtime.programs import OTHERS
from tests.engine.test_goldens import check_equal, golden_prompts
from tests.support import INVARIANT, SMALL, finish, run, small_llm

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=[INVARIANT, pytest.param(SMALL, marks=pytest.mark.slow)], ids=["one", "ladder"])
def llm(request):
    return small_llm("qwen3_window", request.param)


def test_greedy_tokens_equal_the_reference_in_a_pool_of_nan(llm):
    prompts, tokens, best = golden_prompts("qwen3_window")
    check_equal(run(llm, [p.tolist() for p in prompts], GREEDY, fill=math.nan), tokens, best)


@pytest.mark.parametrize("num_blocks", [80, 15], ids=["plain", "evictions and preemption"])
def test_reuse_changes_no_token(llm, num_blocks):
    """Each prompt as two choices, then all of them with three tokens of their answers, while blocks are given back."""
    prompts, tokens, best = golden_prompts("qwen3_window")
    config = dataclasses.replace(llm.config, num_blocks=num_blocks)
    engine = build_engine(llm.loaded, config, None, fill=math.nan)
    for used in (0, 3):
        ids = [
            engine.add([*p.tolist(), *t[:used].tolist()], dataclasses.replace(GREEDY, n=2, max_tokens=64 - used))
            for p, t in zip(prompts, tokens, strict=True)
        ]
        outputs = finish(engine)
        for choice in range(2):
            found = [outputs[id].outputs[choice] for id in ids]
            check_equal(found, [t[used:] for t in tokens], [b[used:] for b in best])
    metrics = engine.scheduler.metrics()
    assert metrics.left_behind_blocks > 20 and metrics.hits > len(prompts)
    assert metrics.evictions or num_blocks > 15  # a window's pool is small, so it may evict in a large one too


def test_windows_add_no_executable_and_no_compile(llm):
    stats, ladder = llm.stats(), llm.loaded.layout.ladder
    parts = len(ladder.buckets) + len(ladder.row_buckets) + len(OTHERS)
    assert stats["executables"] == parts and stats["compiles_after_ready"] == 0
