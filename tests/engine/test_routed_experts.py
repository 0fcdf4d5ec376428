"""With return_routed_experts a choice that has ended has the experts of each token that the layers have seen."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.runtime.step import expert_dtype
from tests.forked import call
from tests.support import GOLDENS, INVARIANT, SMALL, answers, fresh_engine, run, small_llm, step

NAMES = sorted(path.parent.name for path in GOLDENS.glob("routed_experts/*/golden.npz"))
GIVES = dataclasses.replace(INVARIANT, return_routed_experts=True)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(6, 250, n).tolist() for n in (1, 40, 17, 33)]


@pytest.fixture(scope="module")
def llm():
    return small_llm("qwen3_moe", GIVES)


def experts(output, choice: int = 0) -> np.ndarray:
    found = output.outputs[choice].routed_experts
    assert found is not None, "they were asked for"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_that_the_reference_chooses(name):
    """Prompts go in chunks of 16 tokens; the reference has each sequence whole."""
    golden = np.load(GOLDENS / name / "golden.npz")
    wanted = np.load(GOLDENS / "routed_experts" / name / "golden.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in (2, 3, 4)]
    params = dataclasses.replace(GREEDY, max_tokens=64)
    found = run(small_llm(name, GIVES), prompts, params, max_num_batched_tokens=16)
    for i, output in zip((2, 3, 4), found, strict=True):
        assert list(output.token_ids) == golden[f"tokens_{i}"].tolist()
        np.testing.assert_array_equal(np.sort(experts(output)), wanted[f"experts_{i}"])


@pytest.mark.slow
def test_every_token_but_the_last_has_some_of_each_layer_best_first(llm):
    spec = llm.spec.experts
    for output in run(llm, PROMPTS, dataclasses.replace(GREEDY, n=2, temperature=1.0)):
        for choice in (0, 1):
            found = experts(output, choice)
            assert found.shape == (len(output.prompt_token_ids) + 11, len(spec.layers), spec.num_experts_per_tok)
            assert found.dtype == np.uint8 and found.max() < spec.num_experts
            assert all(len(set(row)) == len(row) for row in found.reshape(-1, spec.num_experts_per_tok).tolist())


@pytest.mark.slow
def test_in_invariant_mode_neither_companions_chunks_nor_preemption_change_one(llm):
    alone = [experts(run(llm, [prompt], GREEDY)[0]) for prompt in PROMPTS]
    for sizes in ({}, {"max_num_batched_tokens": 5}, {"num_blocks": 6, "max_num_batched_tokens": 7}):
        for found, wanted in zip(run(llm, PROMPTS, GREEDY, **sizes), alone, strict=True):
            np.testing.assert_array_equal(experts(found), wanted)


@pytest.mark.slow
def test_a_preempted_row_has_all_of_its_tokens(llm):
    engine = fresh_engine(llm, num_blocks=6)
    outputs = answers(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    assert engine.scheduler.metrics().preemptions
    assert all(len(experts(output)) == len(output.prompt_token_ids) + 11 for output in outputs)


@pytest.mark.slow
def test_they_come_when_a_choice_ends_and_not_where_its_tokens_were_not_computed(llm):
    engine = fresh_engine(llm)
    engine.add(PROMPTS[1], GREEDY, RequestOptions(streams=True))
    outputs = []
    while engine.has_unfinished:
        outputs += step(engine)
    assert len(outputs) == 12
    assert all((output.outputs[0].routed_experts is not None) == output.finished for output in outputs)
    engine.add(PROMPTS[1], GREEDY)
    (ended,) = step(engine, engine.abort_all)
    assert ended.finish_reason == "abort" and ended.outputs[0].routed_experts is None


@pytest.mark.slow
def test_without_being_asked_for_there_are_none():
    (output,) = run(small_llm("qwen3_moe", INVARIANT), PROMPTS[:1], GREEDY)
    assert output.outputs[0].routed_experts is None


def test_a_model_without_experts_refuses():
    with pytest.raises(ValueError, match="return_routed_experts is True, and this model has no experts; leave it"):
        small_llm("qwen3", GIVES)


def test_more_experts_than_a_byte_can_name_take_two():
    assert [expert_dtype(n).itemsize for n in (8, 256, 257, 2**16)] == [1, 1, 2, 2]


@pytest.mark.slow
@pytest.mark.long
def test_meshes_have_the_same():
    one, *others = call(on_meshes, "tp=1", "tp=2", "dp=2", "dp=2,tp=1,ep=1", devices=2)
    assert len(others) == 3 and all(other == one for other in others)


def on_meshes(*meshes: str) -> list[list[list]]:
    configs = [dataclasses.replace(SMALL, return_routed_experts=True, mesh=mesh) for mesh in meshes]
    return [
        [experts(output).tolist() for output in run(small_llm("qwen3_moe", config), PROMPTS, GREEDY)]
        for config in configs
    ]
