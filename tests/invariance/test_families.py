"""Families that the invariance suite does not run: the reference's tokens in chunks, on hits, after preemption."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.loading import build_engine
from tests.engine.test_goldens import check_equal, golden_prompts
from tests.support import INVARIANT, finish, small_llm

NAMES = (
    *("gemma2", "gemma2_untied", "gemma3", "gemma3_long_window", "gpt_oss", "gpt_oss_mxfp4", "mistral", "mistral_full"),
    *("mixtral", "mixtral_window", "phi3", "phi3_long"),
)
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
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
        assert metrics.hits >= (5 if num_blocks == 80 else 1)
        assert bool(metrics.preemptions + metrics.evictions) == (num_blocks == 18)
