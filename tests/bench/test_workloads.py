"""What a benchmark reads from an engine's steps."""

import time
from types import SimpleNamespace

from ferrum_jax.cli.benchmarks import workloads
from ferrum_jax.cli.benchmarks.workloads import step_times


class FakeRunner:
    def dispatch(self, plan: SimpleNamespace) -> SimpleNamespace:
        return plan


def plan_of(num_rows: int, num_tokens: int, horizon: int = 1) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=num_tokens, shards=[SimpleNamespace(num_rows=num_rows, horizon=horizon)])


def watch(plans: list[SimpleNamespace]) -> list[float]:
    runner = FakeRunner()
    with step_times(SimpleNamespace(engine=SimpleNamespace(runner=runner))) as times:  # pyright: ignore[reportArgumentType]
        for plan in plans:
            time.sleep(0.01)
            runner.dispatch(plan)
    assert runner.dispatch.__func__ is FakeRunner.dispatch
    return times


def test_only_steps_of_decoding_rows_that_follow_their_like_are_timed() -> None:
    assert len(watch([plan_of(4, 4)] * 4)) == 3 and min(watch([plan_of(4, 4)] * 2)) >= 0.01
    assert len(watch([plan_of(1, 7), plan_of(1, 1), plan_of(1, 1), plan_of(2, 2)])) == 1
    assert watch([plan_of(1, 7), plan_of(1, 7)]) == []
    assert 0.01 / 4 <= min(watch([plan_of(2, 8, horizon=8)] * 9)) < 0.01, "a forward's time, of four in a launch"


def test_a_share_of_the_bandwidth_above_1_is_refused_as_a_measurement():
    step = {"decode_step_s": 0.5}
    assert workloads._of_roofline(step, 4.0, 10.0) == {"of_bandwidth_roofline": 0.8}
    refused = workloads._of_roofline(step, 6.0, 10.0)
    assert refused["of_bandwidth_roofline"] is None and "1.20 of the bandwidth" in refused["refused"]
