"""Launches that go on say on a mesh what steps say there, to the bit, whichever data shard has more to compute."""

import dataclasses

import pytest

from ferrum_jax.core.plan import Draw
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.llm import LLM
from ferrum_jax.runtime.horizons import Horizons
from ferrum_jax.runtime.runner import Runner
from tests.engine.test_horizons import PLAIN, PROMPTS, in_one_bucket
from tests.sharding.same import said_on
from tests.support import GOLDENS, SMALL, answers, requests_of, told

MOST = [3, 9, 40, 20, 17, 30, 2, 12]


def say(family: str, mesh: str) -> tuple[list, list, set]:
    """Steps' bits, those of launches that go on, and how many tokens shards computed in one of these at once."""
    llm, seen, dispatch = LLM(str(GOLDENS / family), dataclasses.replace(SMALL, mesh=mesh)), set(), Runner.dispatch
    loaded = in_one_bucket(llm)
    requests = requests_of(
        [*PROMPTS, *[[*prompt, 5] for prompt in PROMPTS]],
        [dataclasses.replace(PLAIN, max_tokens=most) for most in MOST],
    )

    def spying(self, plan, *rest):
        if plan.shards[0].horizon > 1:
            seen.add(tuple(max(shard.counts.tolist(), default=0) for shard in plan.shards))
        return dispatch(self, plan, *rest)

    Horizons.look = lambda *_: ()
    steps = told(answers(build_engine(loaded, llm.config, None), requests))
    Horizons.look, Runner.dispatch = lambda *_: ((4, int(Draw.PLAIN), 8),), spying
    return steps, told(answers(build_engine(loaded, llm.config, None), requests)), seen


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "llama_linear"])
def test_launches_that_go_on_have_the_bits_of_steps_on_a_mesh(family):
    ((steps, launches, seen),) = said_on(say, family, "dp=2,tp=2")
    assert launches == steps and any(0 < first != second > 0 for first, second in seen), seen
