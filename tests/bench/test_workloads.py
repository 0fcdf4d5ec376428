"""What a benchmark reads from an engine's steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.bench import workloads
from ferrum_jax.bench.workloads import StepTimes, step_times


class FakeStep:
    """A step that is done at `end`."""

    def __init__(self, plan: SimpleNamespace, end: float) -> None:
        self.plan, self.end = plan, end

    @property
    def is_done(self) -> bool:
        return time.perf_counter() >= self.end

    def rows(self) -> np.ndarray:
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return np.zeros((1, 1), np.int32)


class FakeRunner:
    """Steps take so many seconds, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.end = seconds, 0.0

    def dispatch(self, plan: SimpleNamespace) -> FakeStep:
        self.end = max(self.end, time.perf_counter()) + self.seconds
        return FakeStep(plan, self.end)


def plan_of(num_rows: int, num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=num_tokens, shards=[SimpleNamespace(num_rows=num_rows)])


def watch(plans: list[SimpleNamespace], *, step_s: float, host_s: float) -> StepTimes:
    """Each step is dispatched before the result of the one before it is asked for."""
    runner = FakeRunner(step_s)
    with step_times(SimpleNamespace(engine=SimpleNamespace(runner=runner))) as times:  # pyright: ignore[reportArgumentType]
        last = None
        for plan in plans:
            time.sleep(host_s)
            step = runner.dispatch(plan)
            if last is not None:
                last.rows()
            last = step
    assert runner.dispatch.__func__ is FakeRunner.dispatch
    return times


def test_a_device_that_always_has_the_next_step_shows_no_gap() -> None:
    times = watch([plan_of(4, 4)] * 4, step_s=0.05, host_s=0.0)
    assert times.gaps_s == [0.0] * 3
    assert times.summary()["late_steps"] == 0


def test_a_host_that_is_slower_than_the_device_shows_its_own_time() -> None:
    times = watch([plan_of(4, 4)] * 4, step_s=0.0, host_s=0.02)
    assert len(times.gaps_s) == 3 and min(times.gaps_s) >= 0.02
    assert times.summary()["late_steps"] == 1
    assert times.summary()["decode_step_s"] == pytest.approx(0.02, abs=0.02)


def test_only_steps_of_decoding_rows_that_follow_their_like_are_counted() -> None:
    assert len(watch([plan_of(1, 7), plan_of(1, 1), plan_of(1, 1), plan_of(2, 2)], step_s=0, host_s=0).steps_s) == 1
    assert watch([plan_of(1, 7), plan_of(1, 7)], step_s=0, host_s=0).summary() == {}


def test_bench_serve_names_what_measures_a_server(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--url", "http://127.0.0.1:8000", "--num-prompts", "8"])
    said = capsys.readouterr().err
    assert "`vllm bench serve` or `guidellm run`" in said and "unrecognized" not in said


def test_a_share_of_the_bandwidth_above_1_is_refused_as_a_measurement():
    step = {"decode_step_s": 0.5}
    assert workloads._of_roofline(step, 4.0, 10.0) == {"of_bandwidth_roofline": 0.8}
    refused = workloads._of_roofline(step, 6.0, 10.0)
    assert refused["of_bandwidth_roofline"] is None and "1.20 of the bandwidth" in refused["refused"]
