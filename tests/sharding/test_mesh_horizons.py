"""Launches that go on say on a mesh what steps say there, to the bit, whichever data shard has more to compute."""

import dataclasses

import pytest

from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.llm import LLM
from tests.engine.test_horizons import PLAIN, PROMPTS, go_on, in_one_bucket
from tests.engine.test_request_log import watch
from tests.sharding.same import said_on
from tests.support import GOLDENS, SMALL, answers, requests_of, told


def say(family: str, mesh: str) -> tuple[list, list, list[list[int]]]:
    """Steps' bits, those of launches that go on, and the forwards that each shard has in one of these."""
    llm, said, plans = LLM(str(GOLDENS / family), dataclasses.replace(SMALL, mesh=mesh)), [], []
    loaded, prompts = in_one_bucket(llm), [*PROMPTS, *([*prompt, 5] for prompt in PROMPTS)]
    params = [dataclasses.replace(PLAIN, max_tokens=most) for most in (3, 9, 40, 20, 17, 30, 2, 12)]
    for horizon in (1, 8):
        with pytest.MonkeyPatch.context() as patch:
            go_on(patch, horizon)
            engine = build_engine(loaded, llm.config, None)
            plans = watch(engine)
            said.append(told(answers(engine, requests_of(prompts, params))))
    counts = [[max(s.counts.tolist(), default=0) for s in plan.shards] for plan in plans if plan.shards[0].horizon > 1]
    return said[0], said[1], counts


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "llama_linear"])
def test_launches_that_go_on_have_the_bits_of_steps_on_a_mesh(family):
    ((steps, launches, counts),) = said_on(say, family, "dp=2,tp=2")
    assert launches == steps and any(0 < first != second > 0 for first, second in counts), counts
