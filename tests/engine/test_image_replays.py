"""A request log of prompts with images, replayed at the size of its engine, plans the engine's steps one by one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax.core.scheduler.request_log import read_request_log
from ferrum_jax.planning.offline.replay import replay
from tests.engine.golden_media import CONFIG, FOLDER, GEMMA3, HYBRID, MISTRAL3, asked, engine_of

WHOLE = dataclasses.replace(CONFIG, max_num_batched_tokens=32, max_image_patches=144)
COUNTERS = ("lookups", "hit_tokens", "missed_tokens", "resumed_tokens", "evictions", "refusals", "preemptions")
IMAGE_COUNTERS = ("images_encoded", "image_hits", "image_evictions")


def watch(engine) -> list:
    """The plans that the engine makes from now on."""
    plans, schedule = [], engine.scheduler.schedule

    def watched():
        plan = schedule()
        plans.extend([] if plan is None else [plan])
        return plan

    engine.scheduler.schedule = watched
    return plans


def serve(engine, folder: str, seed: int, num_requests: int) -> None:
    """Prompts with 0, 1 and 3 images, some of them seen before, arrive while others run."""
    rng = np.random.default_rng(seed)
    for index in range(num_requests):
        brighter = 0.1 * rng.integers(3)
        ids, params, options = asked(int(rng.integers(3)), brighter=brighter, folder=folder)
        changes = ({}, {}, {"n": 2}, {"prompt_logprobs": 0}, {"max_tokens": 40})[rng.integers(5)]
        ids = [*ids, *rng.integers(6, 100, rng.integers(0, 6)).tolist()]
        params = dataclasses.replace(params, **({"max_tokens": int(rng.integers(1, 12))} | changes))
        options = dataclasses.replace(options, key=str(index), priority=int(rng.integers(2)))
        engine.add(ids, params, options)
        for _ in range(rng.integers(0, 7)):
            engine.step()
        if not engine.has_unfinished:
            engine.drain()
    while engine.has_unfinished:
        engine.step()
    engine.drain()


def comparable(plans) -> list:
    """The plans in lists and tuples, requests by their order: ids differ where other things were numbered too."""
    seen = {request for plan in plans for *_, request in plan.admitted}
    seen |= {order.request for plan in plans for order in plan.encodes}
    order = {request: index for index, request in enumerate(sorted(seen))}

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, tuple) else value

    return [
        {
            "shards": [plain(dataclasses.asdict(shard)) for shard in plan.shards],
            "admitted": [(shard, slot, order[request]) for shard, slot, request in plan.admitted],
            "encodes": [(order[each.request], each.image, each.runs) for each in plan.encodes],
        }
        for plan in plans
    ]


def images_waited(plans) -> bool:
    """Whether an image was encoded in one step and its request admitted in a later one."""
    return any(
        order.request not in {request for *_, request in plan.admitted} for plan in plans for order in plan.encodes
    )


@pytest.mark.parametrize(
    ("folder", "config", "sizes"),
    [
        (FOLDER, CONFIG, {"num_blocks": 12, "max_num_batched_tokens": 11}),
        pytest.param(FOLDER, CONFIG, {"num_blocks": 80, "max_num_batched_tokens": 5}, marks=pytest.mark.slow),
        pytest.param(HYBRID, CONFIG, {"num_blocks": 11, "max_num_batched_tokens": 11}, marks=pytest.mark.slow),
        pytest.param(GEMMA3, WHOLE, {"num_blocks": 14, "max_num_batched_tokens": 23}, marks=pytest.mark.slow),
        pytest.param(MISTRAL3, CONFIG, {"num_blocks": 12, "max_num_batched_tokens": 11}, marks=pytest.mark.slow),
    ],
    ids=["preempted", "cut", "recurrent", "whole", "in rows"],
)
def test_a_replay_plans_every_step_with_images_as_the_engine_did(tmp_path, folder, config, sizes):
    path = tmp_path / "requests.jsonl"
    engine = engine_of(config, folder=folder, request_log=str(path), **sizes)
    planned, replayed = watch(engine), []
    serve(engine, folder, seed=1, num_requests=20)
    segments = read_request_log(path)
    outcome = replay(
        segments,
        segments[0].sizes.num_blocks,
        on_step=lambda scheduler: scheduler.check_invariants(),
        on_plan=replayed.append,
    )
    for step, (found, expected) in enumerate(zip(comparable(replayed), comparable(planned), strict=True)):
        assert found == expected, f"step {step}"
    counts, metrics = engine.counts(), engine.scheduler.metrics()
    assert {name: getattr(outcome, name) for name in IMAGE_COUNTERS} == {name: counts[name] for name in IMAGE_COUNTERS}
    assert {name: getattr(outcome, name) for name in COUNTERS} == {name: getattr(metrics, name) for name in COUNTERS}
    assert outcome.image_evictions > 0 and outcome.image_hits > 0 and outcome.hit_tokens > 0
    if sizes["num_blocks"] < 20:
        assert outcome.preemptions > 0 and images_waited(planned)
