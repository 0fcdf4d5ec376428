"""A request log that an engine writes: replayed at the same pool size it gives the engine's own counters and steps."""

import dataclasses
import json

import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.core.scheduler.request_log import LearntText, ToldCosts, read_request_log
from ferrum_jax.inputs.prompt import MediaSpan
from ferrum_jax.planning.offline.replay import replay
from tests.engine.golden_media import CONFIG, FOLDER, GEMMA3, HYBRID, MISTRAL3, asked, engine_of
from tests.marks import few
from tests.support import GOLDENS, INVARIANT, fresh_engine, small_llm

PARAMS = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
COUNTERS = ("lookups", "hit_tokens", "missed_tokens", "resumed_tokens", "evictions", "refusals", "preemptions")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/requests.jsonl", "no, where the request log belongs, is not a folder"),
        ("notes", "notes exists and is not"),
    ],
)
def test_a_request_log_that_cannot_be_one_is_refused_before_anything_is_compiled(tmp_path, name, message):
    (tmp_path / "notes").write_text("what somebody wrote")
    with pytest.raises(ValueError, match=message):
        LLM(str(GOLDENS / "qwen3"), EngineConfig(request_log=str(tmp_path / name)), on_progress=pytest.fail)


@pytest.fixture
def llm():
    return small_llm("qwen3")


def make_engine(llm, path, **overrides):
    return fresh_engine(llm, request_log=str(path), **overrides)


def serve(engine, seed: int, base: SamplingParams = PARAMS) -> None:
    """Forty requests of every kind arrive while others run; some are aborted."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(6, 250, 60).tolist() for _ in range(3)]
    span = MediaSpan(kind="image", digest=b"cat", start=5, length=9)
    added = []
    for index in range(40):
        ids = stems[rng.integers(3)][: rng.integers(20, 60)] + rng.integers(6, 250, rng.integers(1, 20)).tolist()
        changes = (
            {},
            {"n": 3},
            {"stop_token_ids": tuple(range(6, 22))},
            {"stop": ("e", "a")},
            {"prompt_logprobs": 0},
            {"prompt_logprob_token_ids": [5], "prompt_logprob_start": 17},
            {"max_tokens": 60},
            {"ignore_eos": False, "min_tokens": 5, "logit_bias": {0: 100.0}},  # the end token, which is no stop_reason
        )[rng.integers(8)]
        params = dataclasses.replace(base, **changes)
        media = (span,) if rng.integers(4) == 0 else ()
        salt = "a" if rng.integers(4) == 0 else ""
        added.append(engine.add(ids, params, RequestOptions(key=str(index), cache_salt=salt, media=media)))
        for _ in range(rng.integers(0, 12)):
            engine.step()
            engine.scheduler.check_invariants()
        if not engine.has_unfinished:
            engine.drain()
    while engine.has_unfinished:
        engine.step()
    engine.drain()


def totals(*engines) -> dict[str, int]:
    found = [engine.scheduler.metrics().snapshot() | {"steps": engine.runner.num_steps} for engine in engines]
    return {name: sum(metrics[name] for metrics in found) for name in (*COUNTERS, "steps")}


@pytest.mark.parametrize("num_blocks", [14, 80])
def test_a_replay_at_the_same_size_gives_the_counters_of_the_engine(llm, tmp_path, num_blocks):
    engine = make_engine(llm, tmp_path / "requests.jsonl", num_blocks=num_blocks)
    serve(engine, seed=num_blocks)
    outcome = replay(
        read_request_log(tmp_path / "requests.jsonl"),
        num_blocks,
        on_step=lambda scheduler: scheduler.check_invariants(),
    )
    expected = totals(engine)
    assert {name: getattr(outcome, name) for name in expected} == expected
    assert outcome.hit_rate > 0.2 and outcome.too_large == 0
    assert outcome.evictions > 0 and (outcome.preemptions > 0) == (num_blocks == 14)


def test_an_engine_that_is_started_again_adds_a_segment_with_empty_caches(llm, tmp_path):
    engines = []
    for seed in range(2):
        engines.append(make_engine(llm, tmp_path / "requests.jsonl", num_blocks=30))
        serve(engines[-1], seed)
        engines[-1].close()
    segments = read_request_log(tmp_path / "requests.jsonl")
    assert [len(segment.requests) for segment in segments] == [40, 40]
    outcome, expected = replay(segments, 30), totals(*engines)
    assert {name: getattr(outcome, name) for name in expected} == expected


@pytest.mark.parametrize("num_blocks", few([14, 80]))
@pytest.mark.parametrize("method", few(["suffix", "ngram"]))
def test_a_replay_plans_every_step_with_drafts_as_the_engine_did(tmp_path, monkeypatch, method, num_blocks):
    """What steps take is in the log, and so are texts that were learnt. Greedy texts repeat themselves."""
    llm = small_llm("qwen3", INVARIANT)
    path, asked = tmp_path / "requests.jsonl", {"method": method, "num_speculative_tokens": 6}
    engine = make_engine(llm, path, num_blocks=num_blocks, speculative_config=asked, max_num_seqs=4)
    monkeypatch.setattr(engine, "_tell_costs", lambda: None)  # a test's machine has other costs each time
    planned, replayed, greedy = watch(engine), [], dataclasses.replace(PARAMS, temperature=0.0)
    for seed, seconds in ((3, 1.0), (4, 1.4)):
        engine.take_costs([(1, 1.0, [(8, seconds), (64, 2.0)]), (4, 1.0, [(16, seconds)])])
        engine.learn([*range(20 + seed, 60), 7] * 2, 0, "a" if seed == 4 else "")
        serve(engine, seed, greedy)
    segments = read_request_log(path)
    replay(segments, num_blocks, on_plan=replayed.append)
    for step, (found, expected) in enumerate(zip(comparable(replayed), comparable(planned), strict=True)):
        assert found == expected, f"step {step}"
    counts = engine.scheduler.drafting.counts
    assert 20 < counts.accepted_tokens < counts.drafted_tokens
    kinds = [type(event) for event in segments[0].events]
    assert [kinds.count(ToldCosts), kinds.count(LearntText)] == [2, 2]
    assert (engine.scheduler.metrics().preemptions > 0) == (num_blocks == 14)


def test_an_aborted_submission_is_in_the_request_log_with_what_it_had(llm, tmp_path):
    engine = make_engine(llm, tmp_path / "requests.jsonl")
    submission = engine.add([7] * 40, PARAMS)
    for _ in range(6):
        engine.step()
    engine.abort(submission)
    engine.drain()
    line = json.loads((tmp_path / "requests.jsonl").read_text().splitlines()[1])
    assert [c["finish_reason"] for c in line["choices"]] == ["abort"] and len(line["choices"][0]["token_ids"]) == 3
    assert replay(read_request_log(tmp_path / "requests.jsonl"), 80).lookups == 1


WHOLE = dataclasses.replace(CONFIG, max_num_batched_tokens=32, max_image_patches=144)
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


def serve_images(engine, folder: str, seed: int, num_requests: int) -> None:
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
    serve_images(engine, folder, seed=1, num_requests=20)
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
