"""Drafted tokens change no byte with all that an engine has: adapters, images, pools of every kind, scores, updates."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.outputs import NOT_FINITE_REASON
from ferrum_jax.core.request_options import RequestOptions
from tests.engine import golden_media, test_adapters, test_not_finite, test_routed_experts
from tests.golden_table import goldens
from tests.speculation.told import KINDS, check_same, drafted_engine
from tests.support import INVARIANT, SMALL, answers, finish, fresh_engine, requests_of, small_llm, step, told

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
DRAWN = dataclasses.replace(GREEDY, temperature=0.8, seed=5)
RNG = np.random.default_rng(11)
PROMPTS = [[3, 4, 5, 6] * 8, *(RNG.integers(6, 150, n).tolist() for n in (20, 1, 47))]
REQUESTS = requests_of(PROMPTS, [GREEDY, DRAWN] * 2)
FINITE = [([6 if token == test_not_finite.BAD else token for token in ids], *more) for ids, *more in REQUESTS]
DRAFTING = dataclasses.replace(SMALL, max_num_batched_tokens=32, speculative_config={"method": "ngram"})
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "family",
    ["qwen3_window", *(pytest.param(name, marks=slow) for name in (*goldens("recurrent", "slow", "own"), "gemma3"))],
)
def test_windows_and_recurrent_states_have_every_bit(family):
    """A window's blocks are given back, and states go back where a draft does not come true."""
    llm = small_llm(family, INVARIANT)
    for sizes in ({}, {"num_blocks": 10}, {"max_num_batched_tokens": 9}):
        _, engines = check_same(llm, REQUESTS, check_writes=True, **sizes)
        assert ("num_blocks" in sizes) <= (engines["mixed"].scheduler.metrics().preemptions > 0)


@pytest.mark.parametrize(
    "kv_dtype", ["int8", pytest.param("fp8_e4m3", marks=slow), pytest.param("bfloat16", marks=slow)]
)
def test_quantised_pools_have_every_bit(kv_dtype):
    check_same(small_llm("qwen3", dataclasses.replace(INVARIANT, kv_dtype=kv_dtype)), REQUESTS)


@slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pools_of_latents_have_every_bit(kv_dtype):
    check_same(small_llm("deepseek_v3", dataclasses.replace(INVARIANT, kv_dtype=kv_dtype)), REQUESTS)


@slow
def test_rows_with_adapters_and_without_have_every_bit():
    llm = test_adapters.open_llm("llama", test_adapters.LLAMA, poet="llama_patterns", clerk="llama_attention")
    names = ["poet", "", "clerk", "poet"]
    requests = [
        (p, params, dataclasses.replace(o, adapter=n)) for (p, params, o), n in zip(REQUESTS, names, strict=True)
    ]
    plain, _ = check_same(llm, requests, adapters=llm.model.adapters)
    for request, output in zip(requests, plain, strict=True):
        assert told(answers(fresh_engine(llm, adapters=llm.model.adapters), [request])) == told([output])


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
    plain, _ = check_same(llm, requests)
    for number, output in enumerate(plain):
        golden = golden_media.golden(folder)[f"tokens_{number}"].tolist()
        assert list(output.token_ids) == golden[: len(output.token_ids)]
    engine = drafted_engine(llm, plain, "right")
    first = engine.add(*requests[0])
    while not engine.scheduler.drafting.counts.drafted_tokens:
        step(engine)
    assert told(answers(engine, requests[1:])[-1:]) == told(plain[-1:])
    assert first not in engine._submissions


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_next", marks=slow)])
def test_blocks_that_were_spilled_come_back_to_rows_with_drafts(family):
    llm = small_llm(family, INVARIANT)
    sizes = {"num_blocks": 10, "host_cache_bytes": 60 * llm.ledger.host_block_bytes}
    turns = [REQUESTS[3], REQUESTS[0], (RNG.integers(6, 150, 60).tolist(), GREEDY, RequestOptions(key="4"))]
    plain = [answers(fresh_engine(llm), [request])[0] for request in turns]
    for kind in KINDS:
        engine = drafted_engine(llm, plain, kind, check_writes=True, **sizes)
        for _ in range(2):
            assert told(answers(engine, [request])[0] for request in turns) == told(plain)
        metrics = engine.scheduler.metrics()
        assert metrics.spilled_blocks and metrics.loaded_blocks and engine.scheduler.drafting.counts.drafted_tokens


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_next", marks=slow)])
def test_prefixes_that_a_row_with_drafts_left_are_saved_and_loaded(family, tmp_path, monkeypatch):
    llm = small_llm(family, INVARIANT)
    plain = answers(fresh_engine(llm), REQUESTS)
    longer = [
        ([*output.prompt_token_ids, *output.token_ids, 9], params, options)
        for output, (_, params, options) in zip(plain, REQUESTS, strict=True)
    ]
    expected = answers(fresh_engine(llm), longer)
    for kind in KINDS:
        monkeypatch.setattr(llm.calls, "_engine", drafted_engine(llm, plain, kind))
        answers(llm.engine, REQUESTS)
        num_saved = llm.save_prefix_cache(tmp_path / kind)
        monkeypatch.setattr(llm.calls, "_engine", drafted_engine(llm, expected, kind))
        assert llm.load_prefix_cache(tmp_path / kind) == num_saved > 8
        found = answers(llm.engine, longer)
        assert told(found) == told(expected)
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
    plain = answers(fresh_engine(llm), [*REQUESTS, scored])
    for kind in KINDS:
        engine = drafted_engine(llm, plain, kind)
        ids = [engine.add(*request) for request in REQUESTS[:3]]
        while not engine.scheduler.drafting.counts.drafted_tokens:
            step(engine)
        assert told(answers(engine, [REQUESTS[3], scored])) == told(plain[3:])
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
    plain, engines = check_same(llm, REQUESTS)
    for engine in engines.values():
        for found, wanted in zip(answers(engine, REQUESTS), plain, strict=True):
            np.testing.assert_array_equal(found.outputs[0].routed_experts, wanted.outputs[0].routed_experts)
            assert len(found.outputs[0].routed_experts) == len(found.prompt_token_ids) + 23


def test_the_embedding_of_a_prompt_is_the_same_beside_rows_with_drafts():
    llm = small_llm("qwen3", INVARIANT)
    asked = [(p, params, dataclasses.replace(options, embeds=True)) for p, params, options in REQUESTS]
    plain, engines = check_same(llm, asked)
    for engine in engines.values():
        for found, wanted in zip(answers(engine, asked), plain, strict=True):
            np.testing.assert_array_equal(found.embedding, wanted.embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_behind_which_nothing_can_be_drawn_ends_its_row_alone(kind):
    """The bad token is one of the draft, or comes behind it: its row has the tokens before the one that failed."""
    llm, bad = test_not_finite.damaged(), test_not_finite.BAD
    prompts = [*test_not_finite.PROMPTS, [5, 6, 7, 8]]
    biased = dataclasses.replace(GREEDY, logit_bias={bad: 100.0}, min_tokens=0)
    whole = answers(fresh_engine(llm), [(p, GREEDY) for p in prompts])
    ended = dataclasses.replace(whole[0], prompt_token_ids=tuple(prompts[0]))
    draft = dataclasses.replace(ended.outputs[0], token_ids=(bad, *ended.outputs[0].token_ids))
    drafts_of = [dataclasses.replace(ended, outputs=(draft,)), *whole[1:]]
    engine = drafted_engine(llm, drafts_of, kind)
    first, *others = answers(engine, [(prompts[0], biased), *((p, GREEDY) for p in prompts[1:])])
    assert test_not_finite.ends(first) == [("error", NOT_FINITE_REASON, (bad,))]
    assert told(others) == told(whole[1:])
    assert told(answers(engine, [(prompts[0], GREEDY)])) == told(whole[:1])


def test_a_wrong_draft_whose_logits_are_not_finite_harms_nobody():
    """Some drafted tokens have an embedding of NaN, which spoils the tokens before them in the same step."""
    llm = test_not_finite.damaged()
    plain = answers(fresh_engine(llm), FINITE)
    assert all(output.outputs[0].finish_reason == "length" for output in plain)
    engine = drafted_engine(llm, plain, "mixed", check_writes=True)
    source = engine.scheduler.drafting.source
    source._told = lambda token, place: test_not_finite.BAD if place % 8 == 7 else token
    assert told(answers(engine, FINITE)) == told(plain)
    counts = engine.scheduler.drafting.counts
    assert 0 < counts.accepted_tokens < counts.drafted_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_aborted_with_a_step_of_drafts_in_flight_leave_no_trace(kind):
    llm = small_llm("qwen3", INVARIANT)
    plain = answers(fresh_engine(llm), REQUESTS)
    for gone in range(len(REQUESTS)):
        engine = drafted_engine(llm, plain, kind, check_writes=True)
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
        others = [(outputs.pop(id), output) for id, output in zip(ids, plain, strict=True) if id != ids[gone]]
        assert not outputs and told(found for found, _ in others) == told(output for _, output in others)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_draft_go_on_with_other_weights_as_without_drafts(kind):
    """The update comes when every row has the same tokens; rows keep their KV, and publish none of it."""
    llm = small_llm("qwen3", INVARIANT)
    weights, fingerprint = list(llm.loaded.weights), b"others"
    place = list(llm.loaded.layout.targets).index("layers.0.attention.o.weight")
    weights[place] = jnp.asarray(weights[place]) * -3.0
    (request,) = [(PROMPTS[0], dataclasses.replace(DRAWN, max_tokens=40), RequestOptions(key="0", streams=True))]
    (whole,) = answers(fresh_engine(llm), [request])

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

    drafted, at = with_update(drafted_engine(llm, [whole], kind), 9)
    for earlier in range(at, 0, -1):  # one token a step, and a step in flight
        plain, found = with_update(fresh_engine(llm), earlier)
        if found == at:
            break
    assert found == at and told([drafted]) == told([plain])
    assert drafted.token_ids[:at] == whole.token_ids[:at] and drafted.token_ids != whole.token_ids


@pytest.mark.parametrize("config", [INVARIANT, pytest.param(DRAFTING, marks=slow)], ids=["one", "ladder"])
def test_steps_with_drafts_compile_nothing(config, monkeypatch):
    llm = small_llm("qwen3", config)
    plain = answers(fresh_engine(llm, speculative_config=None), REQUESTS)
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
