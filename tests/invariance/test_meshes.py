"""All ways of reuse on several meshes, in a process with simulated devices, each step within the guard of writes."""

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.plan import StepPlan
from ferrum_jax.llm import LLM
from tests.forked import call
from tests.support import GOLDENS, INVARIANT, answers, fresh_engine, run

PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=20)
CASES = {
    "plain": {},
    "chunks, no prompts": {"max_num_batched_tokens": 5, "max_cached_prompts": 0},
    "chunks and preemption": {"max_num_batched_tokens": 5, "num_blocks": 7},
    "tier and preemption": {"num_blocks": 7, "host_cache_bytes": 1 << 20},
}


def prompts() -> list[list[int]]:
    """A short one, one of a whole block, and three with 32 tokens in common."""
    rng = np.random.default_rng(9)
    made = [rng.integers(6, 250, n).tolist() for n in (3, 16, 39, 48, 33)]
    made[3][:32] = made[4][:32] = made[2][:32]
    return made


def bits(output) -> list[list[tuple[int, float]]]:
    return [sorted((token, entry.logprob) for token, entry in row.items()) for row in output.outputs[0].logprobs]


def digest_plans(engine) -> hashlib.blake2b:
    """Digests every plan that the engine dispatches from now on, all of it."""
    state, dispatch = hashlib.blake2b(digest_size=16), engine.runner.dispatch

    def recorded(plan: StepPlan):
        state.update(repr((plan.step, plan.admitted, _listed(plan.shards))).encode())
        return dispatch(plan)

    engine.runner.dispatch = recorded
    return state


def _listed(value: Any) -> Any:
    """Its arrays, and those of its fields and items, as lists."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        return [_listed(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def say(family: str, *meshes: str) -> list[dict[str, object]]:
    """What each mesh says, whose cases all have the bits of each prompt alone without reuse."""
    return [_say(family, mesh) for mesh in meshes]


def _say(family: str, mesh: str) -> dict[str, object]:
    config = dataclasses.replace(INVARIANT, mesh=mesh, max_model_len=128, check_writes=True)
    llm = LLM(str(GOLDENS / family), config)
    alone = [run(llm, [prompt], PARAMS, enable_prefix_caching=False)[0] for prompt in prompts()]
    plans, metrics = {}, {}
    for name, overrides in CASES.items():
        engine = fresh_engine(llm, **overrides)
        state = digest_plans(engine)
        for _ in range(2):
            outputs = answers(engine, [(p, PARAMS) for p in prompts() for _ in range(2)])
            for i, output in enumerate(outputs):
                assert bits(output) == bits(alone[i // 2]), f"{name} on {mesh}: not the bits of the prompt alone"
        plans[name] = state.hexdigest()
        metrics[name] = engine.scheduler.metrics().snapshot()
    return {
        "tokens": [output.outputs[0].token_ids for output in alone],
        "logprobs": [bits(output) for output in alone],
        "plans": plans,
        "metrics": metrics,
    }


@pytest.fixture(scope="module")
def meshes() -> list[dict]:
    return call(say, "llama_linear", "tp=1", "tp=2", "dp=2", devices=2)


@pytest.mark.slow
def test_tokens_and_logits_are_equal_for_any_reuse_chunks_tier_and_mesh(meshes):
    """On one mesh the process has compared bits; between meshes logits agree to 1e-5 of the largest."""
    one, *others = meshes
    with np.load(GOLDENS / "llama_linear" / "golden.npz") as golden:
        error = 1e-5 * np.abs(golden["last_logits"]).max()
    for two in others:
        assert two["tokens"] == one["tokens"]
        for row, expected in zip(two["logprobs"], one["logprobs"], strict=True):
            found, wanted = np.array(row), np.array(expected)
            np.testing.assert_array_equal(found[..., 0], wanted[..., 0])
            np.testing.assert_allclose(found[..., 1], wanted[..., 1], rtol=0, atol=error)
    for mesh in meshes:
        for name, metrics in mesh["metrics"].items():
            assert metrics["hits"] and metrics["saved_prefill_tokens"], name
            assert bool(metrics["preemptions"]) == ("preemption" in name), name
            assert bool(metrics["loaded_blocks"]) == ("tier" in name), name


@pytest.mark.slow
def test_one_device_and_n_devices_of_one_shard_have_equal_tables_and_plans(meshes):
    one, two, _ = meshes
    twice = {  # the model's one KV head is on both devices, and in the host memory of both
        name: metrics | {"host_bytes": 2 * metrics["host_bytes"]} for name, metrics in one["metrics"].items()
    }
    assert two["plans"] == one["plans"] and two["metrics"] == twice
