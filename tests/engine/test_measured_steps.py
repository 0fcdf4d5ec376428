"""What steps take is told when it is news: of each number of rows, for each size that is there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from ferrum_jax.engine import measured_steps
from ferrum_jax.engine.measured_steps import MeasuredSteps
from ferrum_jax.runtime.buckets import make_ladder

LADDER = make_ladder(max_num_seqs=4, max_num_batched_tokens=64, table_width=4, invariant=False)
BUCKETS = {(bucket.num_tokens, bucket.decode_only): bucket for bucket in LADDER.buckets}


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(measured_steps, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def ended(times: MeasuredSteps, clock, seconds: float, bucket, rows: int, drafts: int = 0, prompt: int = 0) -> None:
    """A step that began where the one before it ended."""
    begun_s = clock.s
    clock.s += seconds
    counts = np.full(rows, 1 + drafts + prompt)
    shard = SimpleNamespace(counts=counts, num_drafts=np.full(rows, drafts), num_rows=rows)
    times.ended(SimpleNamespace(plan=SimpleNamespace(shards=[shard], has_drafts=drafts > 0), bucket=bucket), begun_s)


def test_what_is_not_measured_costs_as_its_weights_and_tokens_say(clock):
    (costs,) = MeasuredSteps(accelerator=False).news(LADDER)
    assert costs.num_rows == 4 and dict(costs.sizes)[16] / costs.bare == pytest.approx(2 / 1.25)
    (costs,) = MeasuredSteps(accelerator=True).news(LADDER)
    assert dict(costs.sizes)[64] / costs.bare < 1.3, "weights are what takes long there"


def test_measured_times_are_medians_without_the_first_step_of_a_bucket(clock):
    times = MeasuredSteps(accelerator=False)
    for seconds in (9.0, 0.1, 0.1, 5.0, 0.1):
        ended(times, clock, seconds, BUCKETS[1, True], rows=1)
    for seconds in (9.0, 0.3, 0.3):
        ended(times, clock, seconds, BUCKETS[16, False], rows=1, drafts=3)
    (costs,) = times.news(LADDER)
    assert (costs.num_rows, costs.bare) == (1, pytest.approx(0.1))
    assert dict(costs.sizes)[16] == pytest.approx(0.3) and dict(costs.sizes)[32] == pytest.approx(0.3 * 3 / 2)


def test_steps_that_compute_a_prompt_and_times_of_rest_are_left_out(clock):
    times = MeasuredSteps(accelerator=False)
    for _ in range(3):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
        ended(times, clock, 7.0, BUCKETS[16, False], rows=1, prompt=9)
        clock.s += 1000.0  # nobody asked for anything
    (costs,) = times.news(LADDER)
    assert costs.bare == pytest.approx(0.1) and max(seconds for _, seconds in costs.sizes) < 1


def test_only_news_are_told_and_what_is_old_is_forgotten(clock):
    times = MeasuredSteps(accelerator=False)
    assert times.news(LADDER) and not times.news(LADDER)
    for _ in range(20):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    assert times.news(LADDER)
    for _ in range(20):
        ended(times, clock, 0.101, BUCKETS[1, True], rows=1)
    assert not times.news(LADDER), "it changed by less than a tenth"
    ended(times, clock, 0.1, BUCKETS[16, False], rows=1, drafts=2)
    ended(times, clock, 50.0, BUCKETS[16, False], rows=1, drafts=2)
    for _ in range(8):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    (costs,) = times.news(LADDER)
    assert dict(costs.sizes)[16] == 50.0
    for _ in range(600):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    (costs,) = times.news(LADDER)
    assert dict(costs.sizes)[16] < 1, "a bad moment does not count for ever"


def test_sizes_that_are_missing_are_not_told(clock):
    some = dataclasses.replace(LADDER, missing=frozenset([BUCKETS[16, False]]))
    (costs,) = MeasuredSteps(accelerator=False).news(some)
    assert 16 not in dict(costs.sizes) and 32 in dict(costs.sizes)
