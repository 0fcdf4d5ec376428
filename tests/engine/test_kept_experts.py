"""A hit comes with the experts of its tokens: in invariant mode those that the request has when it runs alone."""

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from ferrum_jax import SamplingParams
from ferrum_jax.engine.engine import Engine
from tests.forked import call
from tests.support import INVARIANT, SMALL, finish, fresh_engine, run, small_llm, step
from tests.support import answers as together

GIVES = dataclasses.replace(INVARIANT, return_routed_experts=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, seed=3)
RNG = np.random.default_rng(8)
STEMS = [RNG.integers(6, 180, 80).tolist() for _ in range(2)]
PROMPTS = [STEMS[stem][:cut] + tail for stem, cut, tail in ((0, 70, []), (0, 48, [9]), (1, 33, []), (0, 64, []))]


@functools.cache
def alone(family: str, prompt: tuple[int, ...], max_tokens: int = 12, n: int = 1) -> list:
    """Tokens and experts of each choice of an engine that has nothing else and reuses nothing."""
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens, n=n, temperature=float(n > 1))
    (output,) = run(small_llm(family, GIVES), [prompt], params, enable_prefix_caching=False)
    return [(choice.token_ids, choice.routed_experts) for choice in output.outputs]


def check(outputs: Sequence, family: str = "qwen3_moe") -> None:
    for output in outputs:
        assert len(output.outputs) == 1
        check_one(output, alone(family, tuple(output.prompt_token_ids)))


def check_one(output, expected: list) -> None:
    for choice, (token_ids, experts) in zip(output.outputs, expected, strict=True):
        assert choice.token_ids == token_ids
        assert len(experts) == len(output.prompt_token_ids) + len(token_ids) - 1
        np.testing.assert_array_equal(choice.routed_experts, experts)


def engine_of(family: str = "qwen3_moe", **overrides) -> Engine:
    """A fresh one; num_host_blocks: usable ones of its host tier."""
    llm = small_llm(family, GIVES)
    if num_host_blocks := overrides.pop("num_host_blocks", 0):
        overrides["host_cache_bytes"] = (num_host_blocks + 1) * llm.ledger.host_block_bytes
    return fresh_engine(llm, **overrides)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list:
    return together(engine, [(prompt, params) for prompt in prompts])


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"max_cached_prompts": 0, "max_num_batched_tokens": 7},
        {"num_blocks": 6},
        {"num_blocks": 7, "num_host_blocks": 20},
    ],
    ids=["plain", "small chunks, no prompts", "preemption", "host tier"],
)
def test_in_invariant_mode_a_hit_has_the_experts_of_the_request_alone(sizes):
    """One prompt after the other, then all at once and twice."""
    engine = engine_of(**sizes)
    for prompt in PROMPTS:
        check(answers(engine, [prompt]))
    check(answers(engine, PROMPTS * 2))
    metrics = engine.scheduler.metrics()
    assert metrics.hits and (metrics.preemptions > 0) == (metrics.evictions > 0) == ("num_blocks" in sizes)
    assert (metrics.loaded_blocks > 0) == ("num_host_blocks" in sizes)


@pytest.mark.slow
def test_a_repeated_prompt_computes_none_of_its_tokens_and_has_all_experts():
    engine = engine_of()
    answers(engine, PROMPTS[:1])
    computed = engine.runner.num_tokens
    (output,) = answers(engine, PROMPTS[:1])
    assert output.num_cached_tokens == 70 and engine.runner.num_tokens - computed == 11
    check([output])


@pytest.mark.slow
def test_choices_of_one_prompt_compute_it_once_and_each_has_its_experts():
    engine = engine_of()
    four = dataclasses.replace(GREEDY, n=4, temperature=1.0)
    (output,) = answers(engine, [PROMPTS[1]], four)
    assert len({choice.token_ids for choice in output.outputs}) > 1
    check_one(output, alone("qwen3_moe", tuple(PROMPTS[1]), n=4))
    assert engine.runner.num_tokens == 49 + 4 * 11


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v3"])
def test_windows_recurrent_layers_and_latents_have_them_too(family):
    engine = engine_of(family)
    for _ in range(2):
        check(answers(engine, PROMPTS), family)
    assert engine.scheduler.metrics().hit_tokens >= 4 * 32


@pytest.mark.slow
def test_where_all_layers_have_a_window_they_take_no_hits():
    engine = engine_of("mixtral_window")
    for _ in range(2):
        outputs = answers(engine, PROMPTS[:1])
        check(outputs, "mixtral_window")
        assert outputs[0].num_cached_tokens == 0 and engine.kept_experts is None


@pytest.mark.slow
def test_blocks_of_scored_requests_come_with_them():
    llm = small_llm("qwen3_moe", GIVES)
    llm.reset_prefix_cache()
    llm.compute_logprobs([PROMPTS[0]], [[7, 8]])
    (output,) = llm.generate([PROMPTS[0]], GREEDY, progress=False)
    assert output.num_cached_tokens == 64
    check([output])
    (scored,) = llm.compute_logprobs([PROMPTS[0]], [[7, 8]])
    assert scored.num_cached_tokens == 64


@pytest.mark.slow
def test_after_an_update_of_the_weights_they_are_of_the_new_ones():
    """One row goes on over the update; what it has is not found by those that follow."""
    llm, engine = small_llm("qwen3_moe", GIVES), engine_of()
    answers(engine, PROMPTS[:1])
    engine.add(PROMPTS[2], GREEDY)
    for _ in range(4):
        step(engine)
    engine.settle()
    changed = tuple(
        w[::-1] if "router" in name else w
        for name, w in zip(llm.loaded.layout.targets, llm.loaded.weights, strict=True)
    )
    engine.renew(changed, b"other", 1)
    updated = finish(engine)
    other = engine_of(enable_prefix_caching=False)
    other.renew(changed, b"other", 1)
    for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[0]):
        (found,), (wanted,) = answers(engine, [prompt]), answers(other, [prompt])
        check_one(found, [(choice.token_ids, choice.routed_experts) for choice in wanted.outputs])
        (before,) = alone("qwen3_moe", tuple(prompt))
        assert not np.array_equal(before[1][: len(prompt)], found.outputs[0].routed_experts[: len(prompt)])
    assert found.num_cached_tokens == 70
    (kept,) = updated.values()
    (before,) = alone("qwen3_moe", tuple(PROMPTS[2]))
    np.testing.assert_array_equal(kept.outputs[0].routed_experts[:33], before[1][:33])


@pytest.mark.slow
def test_saved_prefixes_come_with_them_and_folders_without_are_refused(tmp_path, monkeypatch):
    with_them, without = small_llm("qwen3_moe", GIVES), small_llm("qwen3_moe", INVARIANT)
    for name, llm in (("with", with_them), ("without", without)):
        monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
        llm.generate(PROMPTS[:2], GREEDY, progress=False)
        llm.save_prefix_cache(tmp_path / name)
        monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    with pytest.raises(ValueError, match="holds prefixes that were computed without return_routed_experts"):
        with_them.load_prefix_cache(tmp_path / "without")
    for llm in (with_them, without):
        llm.load_prefix_cache(tmp_path / "with")
    outputs = with_them.generate(PROMPTS[:2], GREEDY, progress=False)
    assert [output.num_cached_tokens for output in outputs] == [70, 49]
    check(outputs)
    (plain,) = without.generate(PROMPTS[:1], GREEDY, progress=False)
    assert plain.num_cached_tokens == 70 and plain.outputs[0].routed_experts is None


@pytest.mark.slow
def test_prefixes_that_are_saved_while_a_step_is_in_flight_have_its_experts(tmp_path, monkeypatch):
    llm = small_llm("qwen3_moe", GIVES)
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    inbox = deque()
    llm.calls.add(inbox, PROMPTS[0], GREEDY)
    llm.calls.step()
    assert llm.save_prefix_cache(tmp_path / "saved") == 4
    llm.calls.end(inbox)
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    llm.load_prefix_cache(tmp_path / "saved")
    (output,) = llm.generate([PROMPTS[0]], GREEDY, progress=False)
    assert output.num_cached_tokens == 64
    check([output])


_ADDS = st.tuples(
    st.integers(0, 1),
    st.sampled_from([5, 16, 33, 47, 48, 70]),
    st.lists(st.integers(6, 8), max_size=1),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 3, 20]),
)
_WORDS = st.one_of(_ADDS, st.integers(1, 9), st.sampled_from(["abort", "reset", "renew"]))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    words=st.lists(_WORDS, min_size=4, max_size=14),
    num_blocks=st.sampled_from([8, 12, 80]),
    num_host_blocks=st.sampled_from([0, 3, 20]),
    max_num_batched_tokens=st.sampled_from([5, 23, 64]),
    max_cached_prompts=st.sampled_from([0, 1, 8]),
)
def test_whatever_happened_before_they_are_those_of_the_request_alone(words, **sizes):
    """words: requests (stem, cut, tail, choices, tokens), steps, and what ends them or makes what is cached old."""
    engine = engine_of(**sizes)
    asked, outputs, version = {}, {}, 0
    for word in words:
        if isinstance(word, tuple):
            stem, cut, tail, n, max_tokens = word
            params = dataclasses.replace(GREEDY, n=n, temperature=float(n > 1), max_tokens=max_tokens)
            asked[engine.add(STEMS[stem][:cut] + tail, params)] = n, max_tokens
        elif isinstance(word, int):
            for _ in range(word if engine.has_unfinished else 0):
                outputs |= {output.request_id: output for output in step(engine) if output.finished}
        elif word == "abort" and asked:
            engine.abort(max(asked))
        elif word == "reset":
            engine.reset_prefix_cache()
        elif word == "renew":
            deltas = step(engine, engine.settle)
            outputs |= {output.request_id: output for output in deltas if output.finished}
            version += 1
            engine.renew(small_llm("qwen3_moe", GIVES).loaded.weights, b"%d" % version, version)
    outputs |= finish(engine)
    for id, output in outputs.items():
        n, max_tokens = asked[id]
        check_one(output, alone("qwen3_moe", tuple(output.prompt_token_ids), max_tokens, n))


@pytest.mark.slow
@pytest.mark.long
def test_data_shards_have_those_of_their_own_blocks():
    one, two = call(on_meshes, "tp=1", "dp=2", devices=2)
    assert one[0] == two[0] and one[1] > 0 and two[1] > 0


def on_meshes(*meshes: str) -> list[tuple[list, int]]:
    """Experts of prompts that ran twice on each mesh, and how many of their tokens were hit."""
    found = []
    for mesh in meshes:
        llm = small_llm("qwen3_moe", dataclasses.replace(SMALL, return_routed_experts=True, mesh=mesh))
        engine = fresh_engine(llm)
        outputs = answers(engine, PROMPTS) + answers(engine, PROMPTS)
        found.append(([o.outputs[0].routed_experts.tolist() for o in outputs], engine.scheduler.metrics().hit_tokens))
    return found
