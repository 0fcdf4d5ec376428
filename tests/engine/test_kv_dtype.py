"""KV dtypes end to end: what they cost in bytes and in logits, and that reuse and company change nothing."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.cli.benchmarks.kv_error import measure_kv_error, prompt_logits
from tests.support import INVARIANT, answers, fresh_engine, requests_of, run, small_llm
from tests.support import logprobs_of as bits

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
PROMPTS = [np.random.default_rng(n).integers(6, 250, n).tolist() for n in (1, 40, 70)]
QUANTISED = ("int8", "fp8_e4m3")
SLOW = [pytest.param(kv_dtype, marks=pytest.mark.slow) for kv_dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2")]


def llm_of(kv_dtype: str):
    """One executable serves all its steps; other tests run the same ones."""
    return small_llm("qwen3", dataclasses.replace(INVARIANT, kv_dtype=kv_dtype))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", *SLOW])
def test_logits_are_those_over_rounded_keys_and_values_and_no_unowned_block_is_read(kv_dtype):
    llm = llm_of(kv_dtype)
    outputs = run(llm, PROMPTS, PARAMS)
    first = bits(outputs[-1])[0]
    exact, rounded = (log_softmax(prompt_logits(llm, PROMPTS[-1], rounds=rounds)[-1]) for rounds in (False, True))
    assert max(abs(rounded[token] - logprob) for token, logprob in first.items()) < 1e-3
    assert (max(abs(exact[token] - logprob) for token, logprob in first.items()) > 0.02) == (kv_dtype != "auto")
    assert [bits(o) for o in run(llm, PROMPTS, PARAMS, fill=0.0)] == [bits(o) for o in outputs]


@pytest.mark.slow
def test_the_ledger_counts_values_and_scales():
    blocks = {kv_dtype: llm_of(kv_dtype).ledger.block_bytes for kv_dtype in ("auto", *QUANTISED)}
    elements = blocks["auto"] // 4
    vectors = elements // llm_of("auto").spec.attention.head_dim
    assert blocks == {"auto": 4 * elements, "int8": elements + 4 * vectors, "fp8_e4m3": elements}
    stats = llm_of("int8").stats()
    assert (stats["kv_dtype"], stats["kv_bytes"]) == ("int8", 81 * blocks["int8"])


def test_chunks_companions_hits_and_preemption_do_not_change_a_bit_over_an_int8_pool():
    llm = llm_of("int8")
    alone = [bits(run(llm, [p], PARAMS, enable_prefix_caching=False)[0]) for p in PROMPTS]
    assert [bits(o) for o in run(llm, PROMPTS, PARAMS, max_num_batched_tokens=5)] == alone
    engine = fresh_engine(llm, num_blocks=8)
    for _ in range(2):
        assert [bits(o) for o in answers(engine, requests_of(PROMPTS, PARAMS))] == alone
    metrics = engine.scheduler.metrics()
    assert metrics.hit_tokens > 0 and metrics.preemptions + metrics.refusals > 0


@pytest.mark.slow
def test_the_logit_error_is_none_unquantised_and_grows_with_the_rounding():
    errors = [measure_kv_error(llm_of(kv_dtype), range(6, 70)) for kv_dtype in ("auto", *QUANTISED)]
    assert [e["kv_dtype"] for e in errors] == ["float32", *QUANTISED]
    assert errors[0]["rms_error"] == errors[0]["max_error"] == 0 and errors[0]["same_top_token"] == 1
    assert 0 < 2 * errors[1]["rms_error"] < errors[2]["rms_error"] < errors[2]["max_error"]
    assert errors[1]["rms_error"] < 0.05 * errors[1]["logit_rms"]
    assert {e["tokens"] for e in errors} == {64}
