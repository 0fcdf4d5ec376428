"""Greedy tokens do not depend on chunks, companions, buckets, reuse, preemption or restarts (default configuration)."""

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.support import answers, fresh_engine, requests_of, run, small_llm

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LENGTHS = (1, 3, 17, 40, 90, 33)


@pytest.fixture(scope="module")
def prompts(family) -> list[list[int]]:
    """Ragged prompts; the last two share 32 tokens."""
    rng = np.random.default_rng(5)
    made = [rng.integers(6, 250, n).tolist() for n in LENGTHS]
    made[-1][:32] = made[-2][:32]
    return made


@pytest.fixture(scope="module")
def expected(family, prompts) -> list[tuple[int, ...]]:
    """Each prompt alone, without reuse."""
    llm = small_llm(family)
    return [run(llm, [p], GREEDY, enable_prefix_caching=False)[0].token_ids for p in prompts]


def tokens(outputs) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("budget", [4, 7, 16])
def test_chunk_size_and_companions_do_not_change_tokens(family, prompts, expected, budget):
    assert tokens(run(small_llm(family), prompts, GREEDY, max_num_batched_tokens=budget)) == expected


@pytest.mark.parametrize(("max_cached_prompts", "cached"), [(0, 80), (256, 90)])
def test_a_prefix_hit_does_not_change_tokens(family, prompts, expected, max_cached_prompts, cached):
    engine = fresh_engine(small_llm(family), max_cached_prompts=max_cached_prompts)
    for _ in range(2):
        assert tokens(outputs := answers(engine, requests_of(prompts, GREEDY))) == expected
    assert outputs[4].num_cached_tokens == cached, "whole blocks, one token before the end, or all"
    assert engine.scheduler.metrics().saved_prefill_tokens > 0


def test_preemption_does_not_change_tokens(family, prompts, expected):
    small = fresh_engine(small_llm(family), num_blocks=8)
    assert tokens(answers(small, requests_of(prompts, GREEDY))) == expected
    assert small.scheduler.metrics().preemptions + small.scheduler.metrics().refusals > 0


def test_nothing_reads_a_block_that_it_does_not_own(family, prompts, expected):
    """Every block that was never written holds 0 here, and NaN in all other tests."""
    assert tokens(run(small_llm(family), prompts, GREEDY, fill=0.0)) == expected


def test_a_restart_in_the_middle_continues_with_the_same_tokens(family, prompts, expected):
    llm = small_llm(family)
    half = [p + list(t[:5]) for p, t in zip(prompts, expected, strict=True)]
    rest = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
    assert tokens(run(llm, half, rest)) == [t[5:] for t in expected]
