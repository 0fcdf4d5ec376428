"""Greedy tokens with reuse on are those with reuse off: equal prompts, choices, chunks, preemption, restarts."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from tests.support import INVARIANT, answers, fresh_engine, run, small_llm

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LENGTHS = (3, 16, 39, 40, 33)


@pytest.fixture(scope="module")
def prompts(family) -> list[list[int]]:
    """A short one, one of a whole block, and three with 32 tokens in common."""
    rng = np.random.default_rng(9)
    made = [rng.integers(6, 250, n).tolist() for n in LENGTHS]
    made[3][:32] = made[4][:32] = made[2][:32]
    return made


@pytest.fixture(scope="module")
def expected(family, prompts) -> list[tuple[int, ...]]:
    """Each prompt alone, without reuse."""
    llm = small_llm(family)
    return [run(llm, [p], GREEDY, enable_prefix_caching=False)[0].token_ids for p in prompts]


@pytest.mark.parametrize(
    ("budget", "num_blocks", "max_cached_prompts"),
    [(16, 80, 256), (16, 80, 0), (4, 80, 256), (7, 80, 256), (16, 6, 2)],
    ids=["plain", "no prompts", "small chunks", "chunks", "preemption"],
)
def test_reuse_changes_no_token(family, prompts, expected, budget, num_blocks, max_cached_prompts):
    """Every prompt three times at once, as two choices each, and then again; unowned blocks and states hold NaN."""
    sizes = {"max_num_batched_tokens": budget, "num_blocks": num_blocks, "max_cached_prompts": max_cached_prompts}
    engine = fresh_engine(small_llm(family), **sizes)
    params = dataclasses.replace(GREEDY, n=2)
    for _ in range(2):
        outputs = answers(engine, [(prompt, params) for prompt in prompts for _ in range(3)])
        for i, output in enumerate(outputs):
            assert [choice.token_ids for choice in output.outputs] == [expected[i // 3]] * 2
    metrics = engine.scheduler.metrics()
    assert metrics.hits and metrics.copied_blocks and bool(metrics.prompt_hits) == bool(max_cached_prompts)
    if num_blocks < 10:
        assert metrics.preemptions and metrics.evictions
    else:
        assert outputs[9].num_cached_tokens == (40 if max_cached_prompts else 39), "all, or all but the last"


def test_nothing_reads_a_block_that_it_does_not_own(family, prompts, expected):
    """Every block that was never written holds 0 here, and NaN in all other tests."""
    assert [o.token_ids for o in run(small_llm(family), prompts, GREEDY, fill=0.0)] == expected


def test_a_restart_in_the_middle_continues_with_the_same_tokens(family, prompts, expected):
    half = [prompt + list(tokens[:5]) for prompt, tokens in zip(prompts, expected, strict=True)]
    outputs = run(small_llm(family), half, dataclasses.replace(GREEDY, max_tokens=5))
    assert [output.token_ids for output in outputs] == [tokens[5:] for tokens in expected]


def test_equal_prompts_that_arrive_together_are_computed_once(family, prompts):
    engine = fresh_engine(small_llm(family))
    answers(engine, [(prompts[3], dataclasses.replace(GREEDY, n=2))] * 3)
    assert engine.runner.num_tokens == 40 + 6 * 9


def test_the_first_token_of_a_repeat_has_the_bits_of_the_first_run(family, prompts):
    """And the parameters of the new request: its own logprobs, temperature and seed."""
    llm = small_llm(family, INVARIANT)
    kinds = [
        dataclasses.replace(GREEDY, logprobs=20, max_tokens=4),
        SamplingParams(temperature=0.9, seed=5, logprobs=3, max_tokens=4, ignore_eos=True, logit_bias={7: 2.0}),
    ]
    cold = [run(llm, [prompts[3]], kind, enable_prefix_caching=False)[0] for kind in kinds]
    engine = fresh_engine(llm)
    answers(engine, [(prompts[3], GREEDY)])
    before = engine.runner.num_tokens
    outputs = answers(engine, [(prompts[3], kind, RequestOptions(key="0")) for kind in kinds])
    assert engine.runner.num_tokens - before == 2 * 3, "only what follows the first token is computed"
    for again, output in zip(outputs, cold, strict=True):
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        assert again.outputs[0].logprobs == output.outputs[0].logprobs
