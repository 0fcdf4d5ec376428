"""Long seeded histories under pressure: every request ends as it does alone, whatever ran beside it."""

from __future__ import annotations

import random

import pytest

from tests.histories import seeded
from tests.scheduling.fake_device import VOCABULARY, Engine


def _random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    prompt = rng.choice(stems)[: rng.randrange(1, longest)]
    return (prompt + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3))])[: longest - 1]


@pytest.mark.parametrize("seed", range(6))
def test_requests_under_pressure_end_as_they_do_alone(seed: int) -> None:
    rng = random.Random(seeded(seed))
    block_size, max_num_seqs = rng.choice([1, 2, 4]), rng.choice([3, 5, 8])
    num_blocks = rng.choice([32, 40]) // block_size
    max_total = min(num_blocks * block_size + 1, 36)
    engine = Engine(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 4, 20]),
        max_model_len=max_total,
        num_host_blocks=rng.choice([0, 4, 30]),
        max_cached_prompts=rng.choice([0, 1, 3]),
    )
    stems = [[rng.randrange(VOCABULARY) for _ in range(max_total)] for _ in range(3)]
    for _ in range(300):
        if rng.random() < 0.4:
            prompt = _random_prompt(rng, stems, max_total)
            engine.add(
                prompt,
                rng.randrange(1, max_total - len(prompt) + 1),
                stop_ids=rng.choice([(), (), (3,)]),
                priority=rng.choice([0, 0, 1]),
                takes_hits=rng.random() < 0.9,
            )
        if rng.random() < 0.05:
            unfinished = [r.id for r in engine.requests.values() if r.finish_reason is None]
            for request_id in unfinished[:1]:
                engine.scheduler.abort(request_id)
        got = [request for request, _ in engine.step() if request.finish_reason is None]
        if got and rng.random() < 0.03:
            engine.scheduler.finish(rng.choice(got), "stop", "text")
    engine.drain()
    counters = engine.cache.metrics()
    assert counters.preemptions and counters.hits and counters.twins_merged and counters.evictions, "no pressure"


@pytest.mark.parametrize("num_host_blocks", [0, 10])
def test_requests_that_live_through_weight_updates_end(num_host_blocks: int) -> None:
    """Rows keep their blocks, which nobody shares; the host tier is emptied with the rest, and fills again."""
    rng = random.Random(seeded(num_host_blocks))
    engine = Engine(
        num_blocks=20,
        block_size=2,
        max_num_seqs=4,
        max_model_len=30,
        num_host_blocks=num_host_blocks,
        max_cached_prompts=2,
    )
    stems = [[rng.randrange(VOCABULARY) for _ in range(30)] for _ in range(3)]
    for update in range(25):
        for _ in range(rng.randrange(12)):
            if rng.random() < 0.4:
                prompt = _random_prompt(rng, stems, 30)
                engine.add(prompt, rng.randrange(1, 31 - len(prompt)), takes_hits=rng.random() < 0.9)
            engine.step()
        while engine.num_in_flight:
            engine.commit()
        engine.scheduler.renew(b"%d" % update)
        engine.scheduler.check_invariants()
        assert not engine.cache.metrics().entries and not engine.cache.metrics().host_entries
    engine.drain()
    counters = engine.cache.metrics()
    assert counters.preemptions and counters.hits and not counters.live
    assert bool(counters.spilled_blocks) == bool(num_host_blocks)
