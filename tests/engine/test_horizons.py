"""Several forwards of one launch say what as many steps say, to the bit where both have one bucket."""

import dataclasses
from collections import deque

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.plan import HORIZONS, Draw
from ferrum_jax.core.scheduler.request_log import read_request_log
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.planning.offline.replay import replay
from ferrum_jax.runtime.buckets import LaunchBucket, make_ladder
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
from ferrum_jax.runtime.dispatched import InFlight
from ferrum_jax.runtime.horizons import LOOK_EVERY, Horizons
from ferrum_jax.runtime.programs import Executables
from tests.engine.test_launches import launching
from tests.engine.test_request_log import comparable, watch
from tests.marks import few
from tests.support import answers, requests_of, small_llm, step, told

PLAIN = SamplingParams(max_tokens=40, seed=4, logprobs=0, ignore_eos=True)
LIMITS = {"max_num_batched_tokens": 16, "table_width": 4, "invariant": False}
PROMPTS = [[7] * 13, [9], [3, 4, 5, 6] * 3, [8, 9]]


def in_one_bucket(llm):
    """The model with the executables of four rows alone: all decodes have the bits of one bucket."""
    loaded = launching(llm, horizons=(1, 8))
    forwards = loaded.executables.forwards
    four = Prepared({bucket: forwards.deferred(bucket) for bucket in forwards if bucket.num_rows == 4})
    return dataclasses.replace(loaded, executables=dataclasses.replace(loaded.executables, forwards=four))


def go_on(monkeypatch, horizon: int) -> None:
    """Has launches of four rows go on for so many forwards."""
    table = tuple((4, int(draw), horizon) for draw in (Draw.GREEDY, Draw.PLAIN))
    monkeypatch.setattr(Horizons, "look", lambda *_: table if horizon > 1 else ())


def turns_of(plans) -> list[tuple[int, int, int]]:
    """Slot, start and forwards of each row in launches that go on."""
    shards = [plan.shards[0] for plan in plans if plan.shards[0].horizon > 1]
    return [each for s in shards for each in zip(s.slots.tolist(), s.starts.tolist(), s.counts.tolist(), strict=True)]


@pytest.mark.parametrize("family", few(["qwen3", "deepseek_v32", "gemma3", "qwen3_next"]))
def test_rows_end_and_cross_blocks_within_a_launch_and_have_the_bits_of_steps(monkeypatch, family, tmp_path):
    """The device draws nothing behind an end. The request log has what it takes to plan all of it again."""
    llm, runs, planned, ended, replayed, fetched = small_llm(family), [], [], set(), [], []
    loaded = in_one_bucket(llm)
    go_on(monkeypatch, 1)
    lists = [o.token_ids for o in answers(build_engine(loaded, llm.config, None), requests_of(PROMPTS, PLAIN))]
    for first in (3, 6, 9, 12):  # each row ends at another token
        ends = [
            next((i for i in range(first + row, 40) if ids.index(ids[i]) == i), 39) for row, ids in enumerate(lists)
        ]
        stops = [dataclasses.replace(PLAIN, stop_token_ids=(ids[i],)) for ids, i in zip(lists, ends, strict=True)]
        runs.append(requests_of(PROMPTS, stops))
    greedy = dataclasses.replace(PLAIN, temperature=0.0, logprobs=None)
    runs.append(requests_of(PROMPTS, [dataclasses.replace(greedy, max_tokens=most) for most in (1, 9, 30, 14)]))
    expected = [told(answers(build_engine(loaded, llm.config, None), requests)) for requests in runs]
    go_on(monkeypatch, 8)
    rows = InFlight.rows
    monkeypatch.setattr(InFlight, "rows", lambda self: fetched.append((self.plan, rows(self).copy())) or fetched[-1][1])
    config = dataclasses.replace(llm.config, check_writes=True, request_log=str(tmp_path / "log.jsonl"))
    for requests, said in zip(runs, expected, strict=True):
        engine = build_engine(loaded, config, None)
        plans = watch(engine)
        assert told(answers(engine, requests)) == said
        last = [len(prompt) + len(choices[0][0]) - 2 for prompt, (choices, _) in zip(PROMPTS, said, strict=True)]
        planned += plans
        for plan, words in fetched[-len(plans) :]:
            for place, (slot, start, count) in enumerate(turns_of([plan])):
                if 0 <= (end := last[slot - 1] - start) < count:
                    ended.add(end)
                    assert not words[8 * place + end + 1 : 8 * place + 8].any()
        counted = [sum(column) for column in zip(*engine.runner.recent_steps, strict=True)]
        assert engine.runner.num_steps == len(engine.runner.recent_steps)
        assert engine.runner.num_tokens == counted[0] + counted[1] and max(n for *_, n in turns_of(plans)) == 8
    assert len(ended) > (5 if llm.spec.state_layers else 7)  # states stop at the end of a block
    replay(read_request_log(tmp_path / "log.jsonl"), llm.config.num_blocks, on_plan=replayed.append)
    assert comparable(replayed) == comparable(planned)


def test_rows_that_come_leave_or_are_preempted_between_launches_have_their_tokens(monkeypatch):
    llm, found = small_llm("qwen3"), []
    loaded, config = in_one_bucket(llm), dataclasses.replace(llm.config, num_blocks=9)
    for horizon in (1, 4):
        go_on(monkeypatch, horizon)
        engine = build_engine(loaded, config, llm.tokenizer)
        ids, outputs, plans = [engine.add(*request) for request in requests_of(PROMPTS, PLAIN)], {}, watch(engine)
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in step(engine) if output.finished}
            aborted = engine._submissions.get(ids[1])
            if aborted is not None and len(aborted.choices[0].request.token_ids) > 7:
                engine.abort(ids[1])
                ids.append(engine.add([5, 6], dataclasses.replace(PLAIN, stop=["never"])))
        found.append([outputs[id].token_ids for id in ids if id in outputs])
        assert engine.scheduler.metrics().preemptions and max((n for *_, n in turns_of(plans)), default=1) == horizon
    assert found[0] == found[1] and len(found[0]) == 4


def looked(times: dict[int, float], num_looks: int = 60) -> list[int]:
    """The forwards of a launch of four rows that looks bring. times: of a forward, by forwards of a launch."""
    ladder = dataclasses.replace(make_ladder(max_num_seqs=4, **LIMITS), has_launches=True, goes_on=True)
    bucket = next(bucket for bucket in ladder.buckets if bucket.num_rows == 4 and bucket.decode_only)
    launch = LaunchBucket(forward=bucket, draw=Draw.PLAIN, horizon=8)
    executables = Executables(forwards=Prepared({}), samples=Prepared({}), others=Prepared({}))
    horizons, found = Horizons(executables), []
    for _ in range(num_looks):
        (told,) = [each for rows, draw, each in horizons.look(ladder, (4, Draw.PLAIN)) if (rows, draw) == (4, 1)] or [1]
        found.append(told)
        for _ in range(LOOK_EVERY):
            executables.worth.times.setdefault((bucket, Draw.PLAIN, told), deque(maxlen=9)).append(times[told])
        if launch in executables.worth.wanted:
            executables.launches.put(launch, DeferredExecutable.made(None))
    return found


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({1: 2e-3, 4: 1.5e-3, 8: 1.2e-3}, 8),
        ({1: 2e-3, 4: 1.98e-3, 8: 2.5e-3}, 1),
        ({1: 9e-3, 4: 5e-3}, 4),
        ({1: 0.03}, 1),
    ],
)
def test_each_horizon_is_tried_now_and_then_and_the_fastest_one_is_taken(times, best):
    found = looked(times, 270)
    assert {*found[:8]} == times.keys() == {*found[250:]} and {*found[8:250]} == {best}


@pytest.mark.parametrize("is_there", [lambda rows: True, lambda rows: rows in (16, 500)], ids=["all", "first"])
def test_steps_of_decodes_in_a_mixed_bucket_do_not_go_on(is_there):
    ladder = make_ladder(max_num_seqs=500, **(LIMITS | {"max_num_batched_tokens": 512}))
    missing = frozenset(bucket for bucket in ladder.buckets if bucket.decode_only and not is_there(bucket.num_rows))
    ladder = dataclasses.replace(ladder, missing=missing, has_launches=True, goes_on=True)
    executables = Executables(forwards=Prepared({}), samples=Prepared({}), others=Prepared({}))
    for launch in ladder.launches:
        executables.launches.put(launch, DeferredExecutable.made(None))
        for each in HORIZONS:
            executables.worth.times[launch.forward, launch.draw, each] = deque([2e-3 / each] * 9)
    told, kinds = Horizons(executables).look(ladder, None), set()
    for rows in range(1, 501):
        bucket = ladder.find(num_tokens=rows, num_rows=rows, longest=1)
        horizon = next(each for most, draw, each in told if draw == Draw.PLAIN and most >= rows)
        assert (horizon > 1) == bucket.decode_only, rows
        kinds.add(bucket.decode_only)
    assert kinds == {True, False}
