"""Run as a process of its own with several CPU devices: one workload in all ways of reuse on meshes, as JSON.

python mesh_matrix.py FAMILY MESH...

On each mesh every case must have the bits of each prompt alone without reuse; what is printed lets meshes be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from typing import Any

import numpy as np

from ferrum_jax import SamplingParams
from ferrum_jax.llm import LLM
from ferrum_jax.plan import StepPlan
from ferrum_jax.startup.build_engine import build_engine
from tests.support import GOLDENS, INVARIANT, finish, run

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


def say(family: str, mesh: str) -> dict[str, object]:
    config = dataclasses.replace(INVARIANT, mesh=mesh, max_model_len=128, check_writes=True)
    llm = LLM(str(GOLDENS / family), config)
    alone = [run(llm, [prompt], PARAMS, enable_prefix_caching=False)[0] for prompt in prompts()]
    plans, metrics = {}, {}
    for name, overrides in CASES.items():
        engine = build_engine(llm.loaded, dataclasses.replace(config, **overrides), None, fill=math.nan)
        state = digest_plans(engine)
        for _ in range(2):
            ids = [
                (engine.add(p, PARAMS), output) for p, output in zip(prompts(), alone, strict=True) for _ in range(2)
            ]
            outputs = finish(engine)
            for id, output in ids:
                assert bits(outputs[id]) == bits(output), f"{name} on {mesh}: not the bits of the prompt alone"
        plans[name] = state.hexdigest()
        metrics[name] = engine.scheduler.metrics().snapshot()
    return {
        "tokens": [output.outputs[0].token_ids for output in alone],
        "logprobs": [bits(output) for output in alone],
        "plans": plans,
        "metrics": metrics,
    }


if __name__ == "__main__":
    print(json.dumps([say(sys.argv[1], mesh) for mesh in sys.argv[2:]]))
