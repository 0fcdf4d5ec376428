"""With return_sampling_mask a choice that has ended says of each of its tokens what could have been drawn there."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.sampling_params import MAX_LOGPROBS
from tests.engine.test_speculation_reach import REQUESTS
from tests.forked import call
from tests.speculation.told import check_same
from tests.support import INVARIANT, SMALL, answers, fresh_engine, peek, run, small_llm, step

GIVES = dataclasses.replace(INVARIANT, return_sampling_mask=True)
PLAIN = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=3)
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(6, 250, n).tolist() for n in (1, 40, 17, 33)]
FILTERS = [
    {},
    {"top_k": 7},
    {"top_p": 0.6},
    {"min_p": 0.1, "temperature": 1.7},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 0.6},
    {"top_p": 0.9, "repetition_penalty": 1.8, "presence_penalty": 0.7, "logit_bias": {7: 9.0, 9: -100.0}},
]


@pytest.fixture(scope="module")
def llm():
    return small_llm("qwen3", GIVES)


def allowed(output, vocabulary: int, choice: int = 0) -> np.ndarray:
    """[tokens, V] bool."""
    found = output.outputs[choice].sampling_mask
    assert found is not None and found.dtype == np.uint8, "it was asked for"
    assert len(found) == len(output.outputs[choice].token_ids)
    bits = np.unpackbits(found, axis=1, bitorder="little").astype(bool)
    assert not bits[:, vocabulary:].any(), "no token is beyond the vocabulary"
    return bits[:, :vocabulary]


@pytest.mark.parametrize("wishes", FILTERS, ids=lambda wishes: "+".join(wishes) or "none")
def test_it_is_the_support_of_the_distribution_that_tokens_are_drawn_from(llm, wishes):
    """`compute_logprobs` takes another way there, one prefill of the finished sequence, and tells the likeliest."""
    params, vocabulary = dataclasses.replace(PLAIN, **wishes), llm.spec.vocab_size
    outputs = run(llm, PROMPTS, params)
    completions = [output.token_ids for output in outputs]
    scored = llm.compute_logprobs(PROMPTS, completions, top=MAX_LOGPROBS, mode="processed", sampling_params=params)
    for output, own in zip(outputs, scored, strict=True):
        bits, rows = allowed(output, vocabulary), np.arange(len(output.token_ids))
        likeliest = np.isfinite(own.top_logprobs)
        np.testing.assert_array_equal(np.take_along_axis(bits, own.top_ids, axis=1)[likeliest], True)
        np.testing.assert_array_equal(likeliest.sum(1), np.minimum(bits.sum(1), MAX_LOGPROBS))
        assert bits[rows, output.token_ids].all()
        assert ("top_k" not in wishes) or (bits.sum(1) <= wishes["top_k"]).all()


@pytest.mark.parametrize("wishes", FILTERS[:5], ids=lambda wishes: "+".join(wishes) or "none")
def test_a_trainer_that_normalises_over_it_has_the_log_probabilities_of_the_sampler(llm, wishes):
    params = dataclasses.replace(PLAIN, **wishes)
    outputs = run(llm, PROMPTS, params)
    completions = [output.token_ids for output in outputs]
    asked = {"mode": "processed", "sampling_params": params}
    both = (llm.compute_logprobs(PROMPTS, completions, top=-1), llm.compute_logprobs(PROMPTS, completions, **asked))
    for output, raw, wanted in zip(outputs, *both, strict=True):
        bits = allowed(output, llm.spec.vocab_size)
        masked = np.where(bits, raw.all_logprobs.astype(np.float64) / params.temperature, -np.inf)
        own = masked[np.arange(len(bits)), output.token_ids] - np.logaddexp.reduce(masked, axis=1)
        np.testing.assert_allclose(own, wanted.logprobs, atol=1e-5)


def test_tokens_that_may_not_end_an_answer_yet_are_not_in_it(llm):
    params = dataclasses.replace(PLAIN, stop_token_ids=(7, 70), min_tokens=6)
    for output in run(llm, PROMPTS, params):
        bits = allowed(output, llm.spec.vocab_size)
        assert not bits[:6, [7, 70]].any() and bits[6:, [7, 70]].all()


def test_at_temperature_0_it_is_the_token_alone_whatever_its_companions_ask_for(llm):
    params = [dataclasses.replace(PLAIN, temperature=0.0, logprobs=2), dataclasses.replace(PLAIN, top_k=4)] * 2
    for together in (params, [params[0]] * 4):
        outputs = run(llm, PROMPTS, together)
        for output, own in zip(outputs, together, strict=True):
            bits = allowed(output, llm.spec.vocab_size)
            if own.temperature == 0:
                np.testing.assert_array_equal(np.argwhere(bits), list(enumerate(output.token_ids)))
            else:
                assert (bits.sum(1) == 4).all()


def test_each_choice_has_its_own_and_neither_companions_nor_preemption_change_one(llm):
    params = dataclasses.replace(PLAIN, n=2, top_p=0.7)
    alone = [run(llm, [prompt], params)[0] for prompt in PROMPTS]
    for sizes in ({}, {"max_num_batched_tokens": 9}, {"num_blocks": 10, "max_num_batched_tokens": 9}):
        for found, wanted in zip(run(llm, PROMPTS, params, **sizes), alone, strict=True):
            for choice in (0, 1):
                masks = [allowed(output, llm.spec.vocab_size, choice) for output in (found, wanted)]
                np.testing.assert_array_equal(*masks)


def test_under_a_grammar_each_token_is_drawn_and_allowed_by_it():
    llm = small_llm("qwen3", GIVES)
    asked = StructuredOutputsParams(regex="(yes|no), certainly")
    params = dataclasses.replace(PLAIN, max_tokens=40, ignore_eos=False, structured_outputs=asked)
    forced = run(small_llm("qwen3", INVARIANT), PROMPTS, params)
    for output, other in zip(run(llm, PROMPTS, params), forced, strict=True):
        bits = allowed(output, llm.spec.vocab_size)
        assert output.text == other.text and output.text.endswith("certainly")
        assert (bits.sum(1) < 50).all() and (bits.sum(1) == 1).any()
        assert bits[np.arange(len(bits)), output.token_ids].all()


def test_drafts_that_come_true_have_those_that_they_have_without():
    llm = small_llm("qwen3", GIVES)
    plain, engines = check_same(llm, REQUESTS)
    for engine in engines.values():
        for found, wanted in zip(answers(engine, REQUESTS), plain, strict=True):
            np.testing.assert_array_equal(found.outputs[0].sampling_mask, wanted.outputs[0].sampling_mask)
            assert len(found.outputs[0].sampling_mask) == 24


def test_it_comes_when_a_choice_ends_and_not_where_another_engine_drew_some(llm):
    engine = fresh_engine(llm)
    id = engine.add(PROMPTS[1], PLAIN, RequestOptions(streams=True))
    outputs = []
    while engine.has_unfinished:
        if len(outputs) == 5:
            before = peek(engine, id)
        outputs += step(engine)
    assert all((output.outputs[0].sampling_mask is not None) == output.finished for output in outputs)
    (resumed,) = answers(fresh_engine(llm), [(PROMPTS[1], PLAIN, RequestOptions(resume=before.outputs))])
    assert resumed.token_ids == outputs[-1].token_ids and resumed.outputs[0].sampling_mask is None


def test_without_being_asked_for_and_where_nothing_is_drawn_there_is_none(llm):
    (output,) = run(small_llm("qwen3", INVARIANT), PROMPTS[:1], PLAIN)
    assert output.outputs[0].sampling_mask is None
    embedded = (PROMPTS[1], dataclasses.replace(PLAIN, max_tokens=1), RequestOptions(embeds=True))
    (output,) = answers(fresh_engine(llm), [embedded])
    assert output.embedding is not None and output.outputs[0].sampling_mask is None


@pytest.mark.slow
@pytest.mark.long
def test_meshes_have_the_same():
    one, *others = call(on_meshes, "tp=1", "tp=2", "dp=2", devices=2)
    assert len(others) == 2 and all(other == one for other in others)


def on_meshes(*meshes: str) -> list[list[list]]:
    configs = [dataclasses.replace(SMALL, return_sampling_mask=True, mesh=mesh) for mesh in meshes]
    params = dataclasses.replace(PLAIN, top_k=9)
    return [
        [output.outputs[0].sampling_mask.tolist() for output in run(small_llm("qwen3_moe", config), PROMPTS, params)]
        for config in configs
    ]
