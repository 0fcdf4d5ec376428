"""Logits that hold NaN or infinity: the row ends with an error, nothing of it is hit again, others are as ever."""

import dataclasses
import functools
import io
import json
import math

import jax.numpy as jnp
import pytest
from rich.console import Console

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.batch.job import EXIT_ROWS_FAILED, JobSettings, run_batch
from ferrum_jax.core.outputs import NOT_FINITE_REASON
from ferrum_jax.models.families import registry
from ferrum_jax.serve.http.http_errors import http_error
from ferrum_jax.serve.link.engine_client import RequestRefused
from tests.support import INVARIANT, answers, fresh_engine, run, small_llm

FAMILY = "qwen2"  # its head is not its embedding, so one bad row there is not in everybody's logits
BAD = 3  # the token whose embedding is NaN
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 280 + 6 for i in range(length)] for j, length in enumerate((40, 5, 33))]
DAMAGED = [*PROMPTS[0][:36], BAD, 8, 9, 10]


@functools.cache
def damaged() -> LLM:
    """The golden model with one embedding of NaN."""
    loaded = small_llm(FAMILY, INVARIANT).loaded
    arrays = dict(zip(loaded.layout.targets, loaded.weights, strict=True))
    arrays["embed.weight"] = jnp.asarray(arrays["embed.weight"]).at[BAD].set(jnp.nan)
    return LLM.from_model(registry.bind(loaded.layout.graph, arrays), INVARIANT)


@functools.cache
def expected() -> list[tuple[int, ...]]:
    return [output.token_ids for output in run(small_llm(FAMILY, INVARIANT), PROMPTS, GREEDY)]


def ends(output) -> list[tuple]:
    return [(choice.finish_reason, choice.stop_reason, choice.token_ids) for choice in output.outputs]


def finish_one(engine, prompt, params=GREEDY):
    return answers(engine, [(prompt, params)])[0]


ERROR = ("error", NOT_FINITE_REASON, ())


@pytest.mark.parametrize("budget", [pytest.param(64, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("caching", [True, False])
def test_a_row_ends_with_a_sentence_and_those_beside_it_have_their_tokens(caching, budget):
    params = [dataclasses.replace(GREEDY, n=2, logprobs=1), *[GREEDY] * len(PROMPTS)]
    overrides = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget}
    outputs = run(damaged(), [DAMAGED, *PROMPTS], params, **overrides)
    assert ends(outputs[0]) == [ERROR, ERROR]
    assert [output.token_ids for output in outputs[1:]] == expected()


def test_a_row_keeps_the_tokens_before_the_one_that_cannot_be_drawn():
    forced = dataclasses.replace(GREEDY, logit_bias={BAD: 100.0}, logprobs=0)
    bad, *others = run(damaged(), [PROMPTS[0], *PROMPTS], [forced, *[GREEDY] * 3])
    assert ends(bad) == [("error", NOT_FINITE_REASON, (BAD,))] and len(bad.outputs[0].logprobs) == 1
    assert [output.token_ids for output in others] == expected()


def test_a_later_request_hits_nothing_of_it_and_shared_heads_are_recomputed():
    engine = fresh_engine(damaged())
    assert ends(finish_one(engine, DAMAGED)) == [ERROR]
    assert not any(pool.num_keyed for pool in engine.scheduler.caches[0].all_pools())
    again = finish_one(engine, PROMPTS[0])
    assert again.num_cached_tokens == 0 and again.token_ids == expected()[0]
    assert finish_one(engine, PROMPTS[0]).num_cached_tokens > 0
    assert ends(finish_one(engine, DAMAGED)) == [ERROR]


def test_a_prompt_with_log_probabilities_that_are_not_finite_reports_none():
    engine = fresh_engine(damaged())
    output = finish_one(engine, DAMAGED, dataclasses.replace(GREEDY, prompt_logprobs=1))
    assert ends(output) == [ERROR]
    assert output.prompt_logprobs[37:] == (None,) * 3
    logprobs = [entry.logprob for found in output.prompt_logprobs if found for entry in found.values()]
    assert all(map(math.isfinite, logprobs))


def test_a_server_says_that_the_fault_is_its_own():
    error = http_error(RequestRefused(NOT_FINITE_REASON))
    assert error is not None and (error.status, error.code) == (500, "logits_not_finite")


def test_a_batch_has_a_line_for_the_error(tmp_path):
    rows = [{"custom_id": str(i), "prompt_token_ids": prompt} for i, prompt in enumerate([DAMAGED, PROMPTS[1]])]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row | {"max_tokens": 3}) + "\n" for row in rows))
    code = run_batch(
        lambda rows: damaged(),
        tmp_path / "in.jsonl",
        tmp_path / "out.jsonl",
        model="tiny",
        console=Console(file=io.StringIO()),
        notice=None,
        settings=JobSettings(now=lambda: 1000.0),
    )
    bad, good = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert code == EXIT_ROWS_FAILED and bad["error"] == {"code": "logits_not_finite", "message": NOT_FINITE_REASON}
    assert good["error"] is None and good["response"]["status_code"] == 200
