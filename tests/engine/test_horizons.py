"""Several forwards of one launch say what as many steps say, to the bit where both have one bucket."""

import dataclasses
from collections import deque

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.plan import Draw
from ferrum_jax.core.scheduler.request_log import read_request_log
from ferrum_jax.core.scheduler.scheduler import Scheduler
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.planning.offline.replay import replay
from ferrum_jax.runtime.buckets import LaunchBucket, make_ladder
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
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


@pytest.fixture
def go_on(monkeypatch):
    """Call it to have launches go on for so many forwards, which nothing does before. Gives the launches' turns so far,
    and those in which a token ended a row."""

    def begin(horizon: int) -> tuple[list[int], set[int]]:
        turns, ended, commit, accepted = [], set(), Scheduler.commit, Scheduler.commit_accepted

        def committed(self, plan, token_ids):
            turns.append(0 if plan.shards[0].horizon > 1 else -1)
            return commit(self, plan, token_ids)

        def taken(self):
            got = accepted(self)
            if got and turns[-1] >= 0:
                ended.update(turns[-1] for request, _ in got if request.finish_reason == "stop")
                turns[-1] += 1
            return got

        table = tuple((4, int(draw), horizon) for draw in (Draw.GREEDY, Draw.PLAIN))
        monkeypatch.setattr(Horizons, "look", lambda *_: table)
        monkeypatch.setattr(Scheduler, "commit", committed)
        monkeypatch.setattr(Scheduler, "commit_accepted", taken)
        return turns, ended

    monkeypatch.setattr(Horizons, "look", lambda *_: ())
    return begin


@pytest.mark.parametrize("family", few(["qwen3", "deepseek_v32", "gemma3", "qwen3_next"]))
def test_rows_end_and_cross_blocks_within_a_launch_and_have_the_bits_of_steps(go_on, family, tmp_path):
    """The request log has what it takes to plan all of it again."""
    llm = small_llm(family)
    loaded = in_one_bucket(llm)
    whole = answers(build_engine(loaded, llm.config, None), requests_of(PROMPTS, PLAIN))
    lists = [output.token_ids for output in whole]
    runs = []
    for first in (3, 6, 9, 12):  # each row ends at another token
        firsts = [
            next((i for i in range(first + row, 40) if ids.index(ids[i]) == i), 39) for row, ids in enumerate(lists)
        ]
        stops = [dataclasses.replace(PLAIN, stop_token_ids=(ids[i],)) for ids, i in zip(lists, firsts, strict=True)]
        runs.append(requests_of(PROMPTS, stops))
    greedy = dataclasses.replace(PLAIN, temperature=0.0, logprobs=None)
    runs.append(requests_of(PROMPTS, [dataclasses.replace(greedy, max_tokens=most) for most in (1, 9, 30, 14)]))
    expected = [told(answers(build_engine(loaded, llm.config, None), requests)) for requests in runs]
    (turns, ended), planned, replayed = go_on(8), [], []
    for requests, said in zip(runs, expected, strict=True):
        config = dataclasses.replace(llm.config, check_writes=True, request_log=str(tmp_path / "log.jsonl"))
        engine = build_engine(loaded, config, None)
        planned.append(watch(engine))
        assert told(answers(engine, requests)) == said
        counted = engine.runner.num_steps, sum(tokens for tokens, _, _ in engine.runner.recent_steps)
        assert counted[0] == len(engine.runner.recent_steps) and counted[1] <= engine.runner.num_tokens
    assert len(ended) > (5 if llm.spec.state_layers else 7) and max(turns) == 8  # states stop at the end of a block
    replay(read_request_log(tmp_path / "log.jsonl"), llm.config.num_blocks, on_plan=replayed.append)
    assert comparable(replayed) == comparable([plan for plans in planned for plan in plans])


def test_rows_that_come_leave_or_are_preempted_between_launches_have_their_tokens(go_on):
    llm = small_llm("qwen3")
    loaded, config = in_one_bucket(llm), dataclasses.replace(llm.config, num_blocks=9)

    def serve() -> tuple[list, int]:
        engine = build_engine(loaded, config, llm.tokenizer)
        ids = [engine.add(*request) for request in requests_of(PROMPTS, PLAIN)]
        found = {}
        while engine.has_unfinished:
            found |= {output.request_id: output for output in step(engine) if output.finished}
            aborted = engine._submissions.get(ids[1])
            if aborted is not None and len(aborted.choices[0].request.token_ids) > 7:
                engine.abort(ids[1])
                ids.append(engine.add([5, 6], dataclasses.replace(PLAIN, stop=["never"])))
        return [found[id].token_ids for id in ids if id in found], engine.scheduler.metrics().preemptions

    expected, _ = serve()
    turns, _ = go_on(4)
    found, preemptions = serve()
    assert found == expected and len(found) == 4 and preemptions and max(turns) == 4


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
        ({1: 2e-3, 4: 1.2e-3, 8: 1.5e-3}, 4),
        ({1: 2e-3, 4: 1.98e-3, 8: 2.5e-3}, 1),
        ({1: 9e-3, 4: 5e-3}, 4),
        ({1: 30e-3}, 1),
    ],
)
def test_each_horizon_is_tried_and_the_fastest_taken_where_a_launch_is_short(times, best):
    found = looked(times)
    assert {*found} == times.keys() and found[8:] == [best] * 52


def test_a_moment_that_was_a_bad_one_is_forgotten():
    times = {1: 2e-3, 4: 3e-3, 8: 1e-3}
    assert {*looked(times, 250)[8:]} == {8} and {*looked(times, 270)[250:]} == {1, 4, 8}
