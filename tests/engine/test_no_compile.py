"""After it is ready an engine compiles nothing, whatever it is asked; and the default ladder is short."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ferrum_jax import EngineConfig, SamplingParams
from ferrum_jax.ints import ceil_div
from ferrum_jax.runtime.buckets import make_ladder
from tests.support import small_llm

MOST_EXECUTABLES = 24
KINDS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"top_p": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 3},
    {"logprobs": 20, "n": 3},
    {"prompt_logprobs": 5, "logprobs": 0},
    {"stop": ["e", "or"], "stop_token_ids": [40, 41]},
)


def test_a_ragged_workload_of_all_kinds_compiles_nothing():
    llm = small_llm("qwen3")
    before = llm.stats()["compiles_after_ready"]  # counts what the process compiles: other tests of it do
    rng = np.random.default_rng(8)
    lengths = (1, 2, 15, 16, 17, 33, 100, 7, 200)
    prompts = [rng.integers(6, 250, n).tolist() for n in lengths]
    params = [SamplingParams(max_tokens=m, **kind) for m, kind in zip(itertools.cycle((9, 1, 4)), KINDS, strict=False)]
    steps = llm.stats()["steps"]
    llm.generate(prompts, params, progress=False)
    list(llm.stream(prompts[3], params[1]))
    llm.generate(prompts[::-1], params, progress=False)
    stats = llm.stats()
    assert stats["steps"] > steps + 30
    assert stats["compiles_after_ready"] == before


@pytest.mark.parametrize("invariant", [False, True])
def test_the_default_ladder_has_few_executables(invariant):
    config = EngineConfig(invariant=invariant)
    ladder = make_ladder(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        table_width=ceil_div(32768, 16),
        invariant=config.invariant,
    )
    assert len(ladder.buckets) + 1 <= MOST_EXECUTABLES, "the steps and the write of a slot"
