"""Drafted tokens change no byte with all that an engine has: adapters, images, pools of every kind, scores, updates."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.outputs import NOT_FINITE_REASON
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.startup.build_engine import build_engine
from tests.engine import golden_media, test_adapters, test_not_finite, test_routed_experts
from tests.golden_table import goldens
from tests.speculation.told import KINDS, drafted_engine
from tests.support import INVARIANT, SMALL, finish, small_llm, step

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
RNG = np.random.default_rng(11)
PROMPTS = [[3, 4, 5, 6] * 8, *(RNG.integers(6, 150, n).tolist() for n in (20, 1, 47))]
REQUESTS = [(prompt, DRAWN if i % 2 else GREEDY, RequestOptions(key=str(i))) for i, prompt in enumerate(PROMPTS)]
FINITE = [([6 if token == test_not_finite.BAD else token for token in ids], *more) for ids, *more in REQUESTS]
DRAFTING = dataclasses.replace(SMALL, max_num_batched_tokens=32, speculative_config={"method": "ngram"})
slow = pytest.mark.slow


def told(output):
    """All that an output says of its choices."""
    choices = [(c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
    return choices, output.prompt_logprobs


def answers(engine, requests):
    """Outputs of requests that run together, in their order."""
    ids = [engine.add(*request) for request in requests]
    outputs = finish(engine)
    return [outputs[id] for id in ids]


def same_with_drafts(llm, requests, kinds=KINDS, *, adapters=None, **overrides):
    """Outputs without drafts, which are those with drafts of each kind, and the engines that had these."""
    config = dataclasses.replace(llm.config, **overrides)
    plain = answers(build_engine(llm.loaded, config, llm.tokenizer, adapters=adapters, fill=math.nan), requests)
    engines = {}
    for kind in kinds:
        engine = engines[kind] = drafted_engine(llm, plain, kind, adapters=adapters, fill=math.nan, **overrides)
        drafted = answers(engine, requests)
        assert [told(output) for output in drafted] == [told(output) for output in plain], kind
        counts = engine.scheduler.drafting.counts
        assert counts.drafted_tokens and bool(counts.accepted_tokens) == (kind != "wrong")
        assert (counts.accepted_tokens < counts.drafted_tokens) == (kind != "right")
    return plain, engines


@pytest.mark.parametrize(
    "family",
    ["qwen3_window", *(pytest.param(name, marks=slow) for name in (*goldens("recurrent", "slow", "own"), "gemma3"))],
)
def test_windows_and_recurrent_states_have_every_bit(family):
    """A window's blocks are given back, and states go back where a draft does not come true."""
    llm = small_llm(family, INVARIANT)
    for sizes in ({}, {"num_blocks": 10}, {"max_num_batched_tokens": 9}):
        _, engines = same_with_drafts(llm, REQUESTS, check_writes=True, **sizes)
        assert ("num_blocks" in sizes) <= (engines["mixed"].scheduler.metrics().preemptions > 0)


@pytest.mark.parametrize(
    "kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=slow), pytest.param("bfloat16", marks=slow)]
)
def test_quantised_pools_have_every_bit(kv_dtype):
    same_with_drafts(small_llm("qwen3", dataclasses.replace(INVARIANT, kv_dtype=kv_dtype)), REQUESTS)


@slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pools_of_latents_have_every_bit(kv_dtype):
    same_with_drafts(small_llm("deepseek_v3", dataclasses.replace(INVARIANT, kv_dtype=kv_dtype)), REQUESTS)


@slow
def test_rows_with_adapters_and_without_have_every_bit():
    llm = test_adapters.open_llm("llama", test_adapters.LLAMA, poet="llama_patterns", clerk="llama_attention")
    names = ["poet", "", "clerk", "poet"]
    requests = [
        (p, params, dataclasses.replace(o, adapter=n)) for (p, params, o), n in zip(REQUESTS, names, strict=True)
    ]
    plain, _ = same_with_drafts(llm, requests, adapters=llm.model.adapters)
    for (prompt, params, options), output in zip(requests, plain, strict=True):
        (alone,) = answers(
            build_engine(llm.loaded, llm.config, llm.tokenizer, adapters=llm.model.adapters),
            [(prompt, params, options)],
        )
        assert told(alone) == told(output)


@pytest.mark.parametrize(
    "folder",
    [golden_media.FOLDER, *(pytest.param(f, marks=slow) for f in (golden_media.HYBRID, golden_media.GEMMA3))],
)
def test_tokens_behind_images_have_every_bit(folder):
    """Their rotary positions are behind those of the images; while one is prefilled, others have drafts."""
    llm = small_llm(folder, golden_media.FAMILIES[folder].config)
    requests = []
    for number in (0, 1, 2):
        prompt, params, options = golden_media.asked(number, folder=folder)
        requests.append((prompt, dataclasses.replace(params, max_tokens=64 - 20 * number, logprobs=2), options))
    plain, _ = same_with_drafts(llm, requests)
    for number, output in enumerate(plain):
        golden = golden_media.golden(folder)[f"tokens_{number}"].tolist()
        assert list(output.token_ids) == golden[: len(output.token_ids)]
    engine = drafted_engine(llm, plain, "right")
    first = engine.add(*requests[0])
    while not engine.scheduler.drafting.counts.drafted_tokens:
        step(engine)
    assert told(answers(engine, requests[1:])[-1]) == told(plain[-1])
    assert first not in engine._submissions


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_next", marks=slow)])
def test_blocks_that_were_spilled_come_back_to_rows_with_drafts(family):
    llm = small_llm(family, INVARIANT)
    sizes = {"num_blocks": 10, "host_cache_bytes": 60 * llm.ledger.host_block_bytes}
    turns = [REQUESTS[3], REQUESTS[0], (RNG.integers(6, 150, 60).tolist(), GREEDY, RequestOptions(key="4"))]
    plain = [answers(build_engine(llm.loaded, llm.config, llm.tokenizer), [request])[0] for request in turns]
    for kind in KINDS:
        engine = drafted_engine(llm, plain, kind, fill=math.nan, check_writes=True, **sizes)
        for _ in range(2):
            assert [told(answers(engine, [request])[0]) for request in turns] == [told(output) for output in plain]
        metrics = engine.scheduler.metrics()
        assert metrics.spilled_blocks and metrics.loaded_blocks and engine.scheduler.drafting.counts.drafted_tokens


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_next", marks=slow)])
def test_prefixes_that_a_row_with_drafts_left_are_saved_and_loaded(family, tmp_path, monkeypatch):
    llm = small_llm(family, INVARIANT)
    plain = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), REQUESTS)
    longer = [
        ([*output.prompt_token_ids, *output.token_ids, 9], params, options)
        for output, (_, params, options) in zip(plain, REQUESTS, strict=True)
    ]
    expected = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), longer)
    for kind in KINDS:
        monkeypatch.setattr(llm.calls, "_engine", drafted_engine(llm, plain, kind, fill=math.nan))
        answers(llm.engine, REQUESTS)
        num_saved = llm.save_prefix_cache(tmp_path / kind)
        monkeypatch.setattr(llm.calls, "_engine", drafted_engine(llm, expected, kind, fill=math.nan))
        assert llm.load_prefix_cache(tmp_path / kind) == num_saved > 8
        found = answers(llm.engine, longer)
        assert [told(output) for output in found] == [told(output) for output in expected]
        assert sum(output.num_cached_tokens for output in found) >= 64


def test_prompts_are_scored_beside_rows_with_drafts():
    """Log-probabilities of a long prompt and of given tokens, while others decode with drafts."""
    llm = small_llm("qwen3", INVARIANT)
    scored = (
        RNG.integers(6, 150, 150).tolist(),
        dataclasses.replace(GREEDY, prompt_logprobs=2),
        RequestOptions(key="s"),
    )
    wanted = llm.compute_logprobs([PROMPTS[3]], [PROMPTS[1]], top=2)[0]
    plain = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), [*REQUESTS, scored])
    for kind in KINDS:
        engine = drafted_engine(llm, plain, kind, fill=math.nan)
        ids = [engine.add(*request) for request in REQUESTS[:3]]
        while not engine.scheduler.drafting.counts.drafted_tokens:
            step(engine)
        late = answers(engine, [REQUESTS[3], scored])
        assert [told(output) for output in late] == [told(output) for output in plain[3:]]
        assert not set(ids) & engine._submissions.keys()
        calls, before = llm.calls, llm.calls._engine
        calls._engine = engine
        try:
            found = llm.compute_logprobs([PROMPTS[3]], [PROMPTS[1]], top=2)[0]
        finally:
            calls._engine = before
        assert found.logprobs.tolist() == wanted.logprobs.tolist()


@slow
def test_experts_of_accepted_tokens_are_those_without_drafts():
    llm = small_llm("qwen3_moe", test_routed_experts.GIVES)
    plain, engines = same_with_drafts(llm, REQUESTS)
    for engine in engines.values():
        for found, wanted in zip(answers(engine, REQUESTS), plain, strict=True):
            np.testing.assert_array_equal(found.outputs[0].routed_experts, wanted.outputs[0].routed_experts)
            assert len(found.outputs[0].routed_experts) == len(found.prompt_token_ids) + 23


def test_the_embedding_of_a_prompt_is_the_same_beside_rows_with_drafts():
    llm = small_llm("qwen3", INVARIANT)
    asked = [(p, params, dataclasses.replace(options, embeds=True)) for p, params, options in REQUESTS]
    plain, engines = same_with_drafts(llm, asked)
    for engine in engines.values():
        for found, wanted in zip(answers(engine, asked), plain, strict=True):
            np.testing.assert_array_equal(found.embedding, wanted.embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_behind_which_nothing_can_be_drawn_ends_its_row_alone(kind):
    """The bad token is one of the draft, or comes behind it: its row has the tokens before the one that failed."""
    llm, bad = test_not_finite.damaged(), test_not_finite.BAD
    prompts = [*test_not_finite.PROMPTS, [5, 6, 7, 8]]
    biased = dataclasses.replace(GREEDY, logit_bias={bad: 100.0}, min_tokens=0)
    whole = answers(build_engine(llm.loaded, llm.config, None), [(p, GREEDY, RequestOptions()) for p in prompts])
    ended = dataclasses.replace(whole[0], prompt_token_ids=tuple(prompts[0]))
    draft = dataclasses.replace(ended.outputs[0], token_ids=(bad, *ended.outputs[0].token_ids))
    drafts_of = [dataclasses.replace(ended, outputs=(draft,)), *whole[1:]]
    engine = drafted_engine(llm, drafts_of, kind, fill=math.nan)
    requests = [(prompts[0], biased, RequestOptions()), *((p, GREEDY, RequestOptions()) for p in prompts[1:])]
    first, *others = answers(engine, requests)
    assert test_not_finite.ends(first) == [("error", NOT_FINITE_REASON, (bad,))]
    assert [told(output) for output in others] == [told(output) for output in whole[1:]]
    (again,) = answers(engine, [(prompts[0], GREEDY, RequestOptions())])
    assert told(again) == told(whole[0])


def test_a_wrong_draft_whose_logits_are_not_finite_harms_nobody():
    """Some drafted tokens have an embedding of NaN, which spoils the tokens before them in the same step."""
    llm = test_not_finite.damaged()
    plain = answers(build_engine(llm.loaded, llm.config, None), FINITE)
    assert all(output.outputs[0].finish_reason == "length" for output in plain)
    engine = drafted_engine(llm, plain, "mixed", fill=math.nan, check_writes=True)
    source = engine.scheduler.drafting.source
    source._told = lambda token, place: test_not_finite.BAD if place % 8 == 7 else token
    assert [told(output) for output in answers(engine, FINITE)] == [told(output) for output in plain]
    counts = engine.scheduler.drafting.counts
    assert 0 < counts.accepted_tokens < counts.drafted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_aborted_with_a_step_of_drafts_in_flight_leave_no_trace(kind):
    llm = small_llm("qwen3", INVARIANT)
    plain = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), REQUESTS)
    for gone in range(len(REQUESTS)):
        engine = drafted_engine(llm, plain, kind, fill=math.nan, check_writes=True)
        ids = [engine.add(*request) for request in REQUESTS]
        for _ in range(100):
            step(engine)
            flying = engine.scheduler._in_flight
            if flying and flying[-1][0].has_drafts and engine.scheduler.num_running == len(ids):
                break
        else:
            pytest.fail("no step of drafts was in flight")
        engine.abort(ids[gone])
        engine.scheduler.check_invariants()
        outputs = finish(engine)
        assert {id: told(outputs[id]) for id in outputs} == {
            id: told(output) for id, output in zip(ids, plain, strict=True) if id != ids[gone]
        }


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_draft_go_on_with_other_weights_as_without_drafts(kind):
    """The update comes when every row has the same tokens; rows keep their KV, and publish none of it."""
    llm = small_llm("qwen3", INVARIANT)
    weights, fingerprint = list(llm.loaded.weights), b"others"
    place = list(llm.loaded.layout.targets).index("layers.0.attention.o.weight")
    weights[place] = jnp.asarray(weights[place]) * -3.0
    (request,) = [(PROMPTS[0], dataclasses.replace(DRAWN, max_tokens=40), RequestOptions(key="0", streams=True))]
    (whole,) = answers(build_engine(llm.loaded, llm.config, llm.tokenizer), [request])

    def with_update(engine, num_tokens: int | None):
        """The output, and after how many tokens the weights were others: at least so many."""
        id = engine.add(*request)
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in step(engine)}
            known = len(engine._submissions[id].choices[0].request.token_ids) if id in engine._submissions else 0
            if num_tokens is not None and known >= len(PROMPTS[0]) + num_tokens:
                outputs |= {output.request_id: output for output in step(engine, engine.settle)}
                at, num_tokens = len(engine._submissions[id].choices[0].request.token_ids) - len(PROMPTS[0]), None
                engine.renew(tuple(weights), fingerprint, 1)
                engine.scheduler.check_invariants()
        return outputs[id], at

    drafted, at = with_update(drafted_engine(llm, [whole], kind, fill=math.nan), 9)
    for earlier in range(at, 0, -1):  # one token a step, and a step in flight
        plain, found = with_update(build_engine(llm.loaded, llm.config, llm.tokenizer), earlier)
        if found == at:
            break
    assert found == at and told(drafted) == told(plain)
    assert drafted.token_ids[:at] == whole.token_ids[:at] and drafted.token_ids != whole.token_ids


@pytest.mark.parametrize("config", [INVARIANT, pytest.param(DRAFTING, marks=slow)], ids=["one", "ladder"])
def test_steps_with_drafts_compile_nothing(config, monkeypatch):
    llm = small_llm("qwen3", config)
    plain = answers(build_engine(llm.loaded, dataclasses.replace(config, speculative_config=None), None), REQUESTS)
    monkeypatch.setattr(llm.calls, "_on_recompile", "error")
    monkeypatch.setattr(llm.calls, "num_compiles", 0)
    for kind in KINDS:
        engine = drafted_engine(llm, plain, kind)
        monkeypatch.setattr(llm.calls, "_engine", engine)
        found = llm.generate(PROMPTS, [params for _, params, _ in REQUESTS], progress=False)
        assert [output.token_ids for output in found] == [output.token_ids for output in plain]
        counts = engine.scheduler.drafting.counts
        assert counts.drafted_tokens and bool(counts.accepted_tokens) == (kind != "wrong")
    assert llm.stats()["compiles_after_ready"] == 0
