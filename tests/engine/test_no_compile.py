"""After it is ready an engine compiles nothing, whatever it is asked; and the default ladder is short."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
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
    assert stats["compiles_after_ready"] == 0


@pytest.mark.parametrize("on_recompile", ["warn", "error"])
def test_a_step_that_compiles_is_said_or_refused_and_counted(monkeypatch, on_recompile):
    llm = small_llm("qwen3")
    monkeypatch.setattr(llm.calls, "_on_recompile", on_recompile)
    step = llm.engine.step

    def step_that_compiles():
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
        return step()

    monkeypatch.setattr(llm.engine, "step", step_that_compiles)
    monkeypatch.setattr(llm.calls, "num_compiles", 0)  # other tests use this LLM
    expected = pytest.warns(RuntimeWarning, match=r"a step compiled 1 program")
    if on_recompile == "error":
        expected = pytest.raises(RuntimeError, match=r"a step compiled 1 program.*on_recompile='warn'")
    with expected:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), progress=False)
    assert llm.stats()["compiles_after_ready"] > 0


@pytest.mark.parametrize("who", ["another thread", "the user"])
def test_what_others_compile_meanwhile_is_not_the_steps(who):
    llm = small_llm("qwen3")

    def compile():
        jax.jit(lambda x: x - 1).lower(jax.ShapeDtypeStruct((5,), jnp.float32)).compile()

    outputs = llm.stream([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0))
    next(outputs)
    if who == "the user":
        compile()
    else:
        thread = threading.Thread(target=compile)
        thread.start()
        thread.join()
    list(outputs)
    assert llm.stats()["compiles_after_ready"] == 0


@pytest.mark.parametrize("invariant", [False, True])
def test_the_default_ladder_has_few_executables(invariant):
    config = EngineConfig(invariant=invariant)
    ladder = make_ladder(
        max_num_seqs=config.rows_on("tpu"),
        max_num_batched_tokens=config.max_num_batched_tokens,
        table_width=ceil_div(32768, 16),
        invariant=config.invariant,
    )
    assert len(ladder.buckets) + 1 <= MOST_EXECUTABLES, "the forwards and the write of a slot"
    assert len(ladder.row_buckets) <= len(ladder.buckets) / 2, "what samples is compiled once for many forwards"
