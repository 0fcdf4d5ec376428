"""The debug mode that digests what is published before and after each step."""

import dataclasses

import jax
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.support import answers, fresh_engine, small_llm

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def guarded(**overrides):
    return fresh_engine(small_llm("qwen3"), check_writes=True, **overrides)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 250, length).tolist()


def test_no_published_or_shared_block_is_written_under_any_load():
    engine = guarded(num_blocks=9, max_cached_prompts=2)
    for _ in range(2):
        prompts = [prompt(*one) for one in ((1, 39), (1, 39), (2, 40), (1, 33), (3, 50))]
        answers(engine, [(each, dataclasses.replace(GREEDY, n=2)) for each in prompts])
    metrics = engine.scheduler.metrics()
    assert metrics.hits and metrics.copied_blocks and metrics.evictions and metrics.prompt_hits


@pytest.mark.parametrize(("pool", "what"), [(0, "block"), (2, "hidden state")])
def test_a_step_that_writes_what_others_may_read_is_found(monkeypatch, pool, what):
    engine = guarded()
    answers(engine, [(prompt(1, 40), GREEDY)])
    (first, *_), dispatch = (
        (id for id, _ in dict(engine.scheduler.caches[0].numbered_pools())[pool].keyed()),
        engine.runner.dispatch,
    )

    def faulty(plan):
        in_flight = dispatch(plan)
        shapes = engine.runner.copies.shapes(pool)

        def zeros(part, size):
            return jax.tree.map(lambda a: np.zeros((size, *a.shape[1:]), a.dtype), shapes)

        engine.runner.write_pool(0, pool, [first], zeros)
        return in_flight

    monkeypatch.setattr(engine.runner, "dispatch", faulty)
    engine.add(prompt(2, 20), GREEDY)
    with pytest.raises(
        RuntimeError, match=rf"wrote what others may read, as \(.*, pool, id\): \[\(0, {pool}, {first}\)\]"
    ):
        engine.step()
