"""The reference's tokens of every family, in all ways of reuse together."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.startup.build_engine import build_engine
from tests.engine.test_goldens import check_equal, golden_prompts
from tests.golden_table import TABLE, goldens, marked
from tests.support import INVARIANT, finish, small_llm

NAMES = goldens("reuse", "slow")
RECURRENT = goldens("recurrent")  # test_recurrent.py
# .ci/run sees each way of reuse of these with fewer tokens, or another shape.
BY_HAND = tuple(name for name in TABLE if name not in (*NAMES, *RECURRENT))
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", [*(marked(name, "slow") for name in NAMES), *(marked(n, "long") for n in BY_HAND)])
def test_greedy_tokens_equal_the_reference_in_chunks_on_hits_and_after_preemption(name):
    """In blocks that hold NaN until they are written. The longest prompts are cut in three and share their head."""
    prompts, tokens, best = golden_prompts(name)
    llm = small_llm(name, INVARIANT)
    for num_blocks in (80, 18):
        config = dataclasses.replace(llm.config, num_blocks=num_blocks)
        engine = build_engine(llm.loaded, config, None, fill=math.nan)
        for used in (0, 3):
            ids = [
                engine.add([*p.tolist(), *t[:used].tolist()], dataclasses.replace(GREEDY, max_tokens=64 - used))
                for p, t in zip(prompts, tokens, strict=True)
            ]
            outputs = finish(engine)
            check_equal([outputs[i] for i in ids], [t[used:] for t in tokens], [b[used:] for b in best])
        metrics = engine.scheduler.metrics()
        # where blocks are few, what is found again is what a preempted row left, which is no hit
        assert metrics.hits >= 5 if num_blocks == 80 else metrics.hits + metrics.resumed_tokens > 0
        assert bool(metrics.preemptions + metrics.evictions) == (num_blocks == 18)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*goldens("together"), *NAMES])
def test_tokens_are_the_references_for_any_chunks_preemption_and_tier(name):
    """All combinations, each prompt twice at once and then again with three tokens of its answer."""
    prompts, tokens, best = ([values[i] for i in (2, 4, 5)] for values in golden_prompts(name))  # 11, 64, 97 tokens
    llm = small_llm(name, INVARIANT)
    for budget, num_blocks, host_cache_bytes in itertools.product((64, 7), (80, 8), (0, 1 << 22)):
        sizes = {
            "max_num_batched_tokens": budget,
            "num_blocks": num_blocks,
            "host_cache_bytes": host_cache_bytes,
        }
        engine = build_engine(llm.loaded, dataclasses.replace(llm.config, **sizes), None, fill=math.nan)
        for used in (0, 3):
            params = dataclasses.replace(GREEDY, max_tokens=9 - used)
            ids = [
                engine.add([*p.tolist(), *t[:used].tolist()], params)
                for p, t in zip(prompts, tokens, strict=True)
                for _ in range(2)
            ]
            outputs = finish(engine)
            for first in (0, 1):
                check_equal([outputs[i] for i in ids[first::2]], [t[used:9] for t in tokens], [b[used:9] for b in best])
        metrics = engine.scheduler.metrics()
        assert metrics.hits and metrics.saved_prefill_tokens, sizes
        assert metrics.preemptions + metrics.refusals + metrics.evictions or num_blocks == 80, sizes
        assert metrics.spilled_blocks or num_blocks == 80 or not host_cache_bytes, sizes
