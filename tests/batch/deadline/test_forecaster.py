"""Ends and prices on simulated clocks and workers: forecasts hold, deadlines that can be kept are kept."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from ferrum_jax.batch.deadline.forecaster import Forecaster, WorkerReport, mean_throughput
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.share import WorkShare
from tests.batch.deadline.simulated_job import SimulatedJob
from tests.histories import seeded
from tests.marks import few

UNEQUAL = ((16, 1.0), (16, 0.5), (32, 1.0), (8, 0.7))
KINDS = {
    "one worker": {},
    "rows that write all they may": {"rows_stop": False},
    "prompts that cost as much as answers": {"read_s": 2e-3},
    "four unequal workers": {"workers": UNEQUAL, "num_rows": 3000},
}


FEW, SEEDS = few(KINDS), few(range(3))


@pytest.mark.parametrize("kind", FEW)
def test_after_a_tenth_of_a_job_its_end_is_known_within_10_percent(kind):
    """After a fifth where four workers share it, because each has done a twentieth by then."""
    errors, inside = [], []
    for seed in range(5):
        job = SimulatedJob(seeded(seed), **KINDS[kind])
        assert job.done.all()
        early = job.forecast_at(0.1 if len(job.workers) == 1 else 0.2)
        errors.append(abs(early.end_s / job.end_s - 1))
        for share in (0.05, 0.1, 0.25, 0.5, 0.9):
            at_s, outlook = job.forecast_at(share)
            inside.append(at_s + outlook.low_s <= job.end_s <= at_s + outlook.high_s)
    assert np.median(errors) < 0.06 and max(errors) < 0.10
    assert np.mean(inside) >= 0.85


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rows_stop", [True, False])
def test_of_rows_by_length_the_end_is_known_within_10_percent_from_a_quarter_on(rows_stop, seed):
    by_length = lambda tokens: np.argsort(tokens.sum(axis=1), kind="stable")  # noqa: E731
    job = SimulatedJob(seeded(seed), order=by_length, rows_stop=rows_stop)
    assert all(abs(job.forecast_at(share).end_s / job.end_s - 1) < 0.10 for share in (0.25, 0.5, 0.9))


@pytest.mark.parametrize("kind", FEW[:-1])  # those of one worker
def test_a_plan_by_what_an_earlier_run_measured_holds_within_10_percent(kind):
    for seed in range(3):
        whole_s = SimulatedJob(seeded(seed), **KINDS[kind]).end_s
        first = SimulatedJob(seeded(seed), within_s=whole_s / 4, **KINDS[kind])
        rest = SimulatedJob(seeded(seed), goes_on=first, **KINDS[kind])
        assert rest.done.all() and 0.2 < first.done.mean() < 0.3
        plan = Forecaster(first.tokens, clock=lambda: 0.0, price_per_hour=36.0)
        plan.tell([dataclasses.replace(worker.forecaster.report(), is_alive=False) for worker in first.workers])
        outlook = plan.outlook(np.flatnonzero(~first.done))
        assert outlook is not None and abs(outlook.seconds / rest.end_s - 1) < 0.10
        spent = first.workers[0].forecaster.spent_s / 100
        assert outlook.spent == pytest.approx(spent) and outlook.cost == pytest.approx(spent + outlook.seconds / 100)
        assert outlook.low_s < rest.end_s < outlook.high_s


@pytest.mark.slow
def test_at_least_95_percent_of_the_deadlines_that_can_be_kept_are_kept():
    """Each deadline is 2 to 40 % later than the job would end without one."""
    random = np.random.default_rng(seeded(1))
    kept = []
    for seed in range(40):
        kind = KINDS[list(KINDS)[seed % len(KINDS)]]
        within_s = SimulatedJob(seeded(seed), **kind).end_s * random.uniform(1.02, 1.4)
        job = SimulatedJob(seeded(seed), within_s=within_s, **kind)
        kept.append(bool(job.done.all()) and job.end_s <= within_s)
    assert np.mean(kept) >= 0.95


@pytest.mark.parametrize("kind", FEW)
def test_a_job_that_does_not_fit_stops_in_time_having_done_what_comes_first(kind):
    random = np.random.default_rng(seeded(2))
    for seed in range(2):
        share = random.uniform(0.3, 0.8)
        whole_s = SimulatedJob(seeded(seed), **KINDS[kind]).end_s
        job = SimulatedJob(seeded(seed), within_s=share * whole_s, **KINDS[kind])
        stopped_s = max(worker.forecaster.spent_s for worker in job.workers)
        assert job.end_s <= stopped_s <= share * whole_s
        assert job.done.mean() > 0.85 * share
        assert job.done[: int(0.6 * share * len(job.done))].all()


@pytest.mark.parametrize("seed", SEEDS)
def test_that_it_does_not_fit_is_known_early_and_with_workers_that_would_do(seed):
    whole_s = SimulatedJob(seeded(seed)).end_s
    job = SimulatedJob(seeded(seed), within_s=0.5 * whole_s)
    at_s, outlook = next(each for each in job.forecasts if each.outlook.fits is False)
    assert at_s < 0.1 * whole_s and outlook.num_workers is not None
    at_s, outlook = job.forecast_at(0.2)
    assert outlook.fits is False and 0.3 < outlook.share < 0.6
    many = [(16, 1.0)] * outlook.num_workers
    helped = SimulatedJob(seeded(seed), within_s=0.5 * whole_s, workers=many)
    assert helped.done.all() and helped.end_s < 0.5 * whole_s and len(many) <= 4


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadline_with_room_is_said_to_fit_and_never_not_to(seed):
    job = SimulatedJob(seeded(seed), within_s=1.6 * SimulatedJob(seeded(seed)).end_s)
    found = [each.outlook.fits for each in job.forecasts if each.at_s > 0.1 * job.end_s]
    assert False not in found and found.count(True) > 0.9 * len(found)


def test_a_budget_ends_the_job_whatever_workers_share_it():
    """An hour costs 36, so a second of a worker costs a hundredth."""
    for workers in (((16, 1.0),), ((16, 1.0), (16, 1.0), (16, 1.0))):
        job = SimulatedJob(seeded(3), workers=workers, budget=1.2, price_per_hour=36.0, num_rows=3000)
        assert not job.done.all() and 0.8 < sum(worker.left_s for worker in job.workers) / 100 <= 1.2
        outlook = job.forecast_at(0.5).outlook
        assert outlook.fits is False and outlook.cost > 1.2 > outlook.spent and outlook.num_workers is None


def test_where_only_the_budget_is_short_no_more_workers_are_asked_for():
    job = SimulatedJob(seeded(3), within_s=1e5, budget=1.2, price_per_hour=36.0)
    outlook = job.forecast_at(0.5).outlook
    assert outlook.fits is False and outlook.num_workers == outlook.num_alive == 1


def clocked(tokens: list[tuple[int, int]], **terms) -> tuple[Forecaster, list[float]]:
    """A forecaster and its clock."""
    now = [0.0]
    return Forecaster(np.array(tokens, np.uint32), clock=lambda: now[0], **terms), now


def sharing(forecaster: Forecaster) -> WorkShare:
    """What decides which rows of its queue a worker begins; nothing is taken or given."""
    return WorkShare(cast("Any", None), cast("Any", None), forecaster, num_undone=lambda: 0, least_s=2.0)


def test_a_row_that_would_not_end_in_time_is_not_begun_but_one_that_never_would_is():
    forecaster, now = clocked([(0, 10)] * 8 + [(0, 40), (0, 1000)], end_s=100.0)
    share = sharing(forecaster)
    for index in range(8):
        assert share.admits(index, 1)
        forecaster.meter.begin(index)
    now[0] = 10.0
    for index in range(8):
        forecaster.meter.end(index)
    assert share.admits(8, 1)  # which takes 40 s
    now[0] = 75.0
    assert not share.admits(8, 1) and share.num_passed == 1
    assert share.admits(0, 1)
    assert share.admits(9, 1)  # whose tokens are kept
    for _ in range(64):
        assert not share.is_closed
        assert not share.admits(8, 1)
    assert share.is_closed


def test_a_row_that_was_passed_over_has_its_turn_again_once_it_fits():
    """The first rows were slow, as where executables are loaded, and those after them are not."""
    forecaster, now = clocked([(0, 10)] * 40 + [(0, 40)], end_s=100.0)
    share = sharing(forecaster)
    forecaster.meter.begin(0)
    now[0] = 30.0
    forecaster.meter.end(0)
    assert forecaster.fits(1) and not share.admits(40, 1)
    share.return_to_passed()
    assert not share.queue and share.num_passed == 1
    for index in range(1, 40):
        forecaster.meter.begin(index)
        now[0] += 0.5
        forecaster.meter.end(index)
    share.return_to_passed()
    assert list(share.queue) == [(40, 1)] and share.num_passed == 0 and share.admits(40, 1)


def test_nothing_is_foreseen_before_rows_have_ended_and_what_never_ends_has_no_end():
    forecaster, now = clocked([(5, 10)] * 20)
    assert forecaster.outlook(np.arange(20)) is None and forecaster.left_s is None and forecaster.over == ""
    forecaster.meter.begin(0)
    now[0] = 5.0
    assert forecaster.outlook(np.arange(20)) is None
    forecaster.meter.end(0)
    assert forecaster.outlook(np.arange(1, 20)) is None and forecaster.throughput is None


def test_a_row_that_failed_or_was_never_begun_counts_for_nothing():
    forecaster, now = clocked([(5, 10)] * 20)
    for index in range(6):
        forecaster.meter.begin(index)
    now[0] = 10.0
    forecaster.meter.drop(5)
    forecaster.meter.end(9)
    assert forecaster.meter.num_ended == 0 and forecaster.meter.running == [0, 1, 2, 3, 4]


def test_rows_that_write_nothing_have_a_pace_too():
    forecaster, now = clocked([(100, 0)] * 40)
    for index in range(20):
        forecaster.meter.begin(index)
        now[0] += 1.0
        forecaster.meter.end(index)
        forecaster.outlook(np.arange(index + 1, 40))
    outlook = forecaster.outlook(np.arange(20, 40))
    assert outlook is not None and outlook.seconds == pytest.approx(20.0, rel=0.1)


def test_the_pace_of_several_workers_is_their_mean_by_what_they_measured():
    def worker(write_s: float, num_rows: int) -> WorkerReport:
        throughput = Throughput(0.0, write_s, 0.05, num_rows)
        return WorkerReport(throughput=throughput, row_s=1.0, spent_s=1.0, price_per_hour=None)

    unmeasured = dataclasses.replace(worker(9.0, 9), throughput=None)
    found = mean_throughput([worker(1.0, 300), worker(2.0, 100), unmeasured])
    assert found is not None and found.write_s == pytest.approx(1.25) and found.num_rows == 400
    assert mean_throughput([unmeasured]) is None and mean_throughput([]) is None


def others(*workers: dict) -> list[WorkerReport]:
    throughput = Throughput(0.1, 1.0, 0.05, 10)
    common = {"throughput": throughput, "row_s": 10.0, "spent_s": 100.0, "price_per_hour": None}
    return [WorkerReport(**{**common, **worker}) for worker in workers]


def test_the_cost_of_a_worker_that_is_at_work_grows_and_that_of_a_dead_one_does_not():
    """At 36 an hour, a second of a worker costs a hundredth."""
    forecaster, now = clocked([(0, 10)] * 20, price_per_hour=36.0, budget=100.0)
    now[0] = 50.0
    forecaster.tell(others({"is_alive": False}, {"is_alive": True}, {"is_alive": True, "price_per_hour": 72.0}))
    assert forecaster.spent_elsewhere == pytest.approx(1.0 + 1.0 + 2.0) and forecaster.spent == pytest.approx(0.5 + 4.0)
    now[0] = 60.0
    assert forecaster.spent_elsewhere == pytest.approx(1.0 + 1.1 + 2.2) and forecaster.spent == pytest.approx(0.6 + 4.3)
    rest_s = (100.0 - 4.9) / (0.01 + 0.01 + 0.02)  # the last writing takes a little of it
    assert forecaster.left_s == pytest.approx(rest_s - 2.0, abs=0.01) and forecaster.over == ""
    forecaster.tell(others({"is_alive": False, "spent_s": 9_990.0}))
    assert forecaster.over == "budget" and forecaster.left_s < 0


def test_what_dead_workers_had_begun_and_took_is_left_for_those_at_work():
    forecaster, _ = clocked([(0, 10)] * 20)
    dead = {"under_way": (0.0, 80.0), "row_s": 60.0, "last_s": 60.0}
    undone = np.arange(20)

    def seconds(*workers: dict) -> float:
        forecaster.tell(others(*workers))
        outlook = forecaster.outlook(undone)
        assert outlook is not None and outlook.num_alive == 1 + sum(worker.get("is_alive", False) for worker in workers)
        return outlook.seconds

    assert seconds(dead) == pytest.approx(200.0 + 0.4 * 60.0)  # this one has not measured a row of its own
    assert seconds(dead | {"is_alive": True}) == pytest.approx((200.0 - 80.0) / 2 + 0.4 * 60.0)
    for index in range(6):
        forecaster.meter.begin(index)
    assert seconds(dead | {"is_alive": True}) == pytest.approx((200.0 - 80.0) / 2 + 0.4 * 60.0)  # nothing is computed
    forecaster.progress = lambda: dict.fromkeys(range(6), (1.0, 5.0))
    assert seconds(dead | {"is_alive": True}) == pytest.approx((200.0 - 80.0 - 30.0) / 2 + 0.4 * 60.0)
    assert seconds(dead | {"last_s": 600.0}) == pytest.approx(200.0 - 30.0 + 0.4 * 60.0)  # its own: 10 tokens beside 5
    assert seconds(dead | {"last_s": 600.0, "is_alive": True}) == pytest.approx((200.0 - 80.0 - 30.0) / 2 + 0.4 * 600.0)


def test_rows_that_run_beside_others_take_what_those_took_and_the_longest_ends_last():
    forecaster, now = clocked([(0, 10)] * 6 + [(20, 30)])
    for index in range(5):
        forecaster.meter.begin(index)
    now[0] = 10.0
    for index in range(4):
        forecaster.meter.end(index)
    forecaster.meter.begin(6)
    assert forecaster.meter.row_s((20, 30)) == pytest.approx((20 * 0.05 + 30) * (4 * 10 + 10) / 40)
    assert forecaster.meter.rest_s == pytest.approx(forecaster.meter.row_s((20, 30)))
    now[0] = 20.0
    assert forecaster.meter.rest_s == pytest.approx(31 * (4 * 10 + 20 + 10) / 40 - 10)
    forecaster.tell(others({"is_alive": False}))
    outlook = forecaster.outlook(np.array([4, 6]))
    assert outlook is not None and outlook.seconds == pytest.approx(0.4 * 5 * 30)  # steps of five rows, of the longest
    report = forecaster.report()
    assert (report.num_running, report.num_slots, report.under_way) == (2, 5, (0.0, 0.0))
    forecaster.progress = lambda: {4: (1.0, 8.0), 6: (0.5, 0.0)}
    outlook = forecaster.outlook(np.array([4, 6]))
    assert outlook is not None and outlook.seconds == pytest.approx(0.4 * 5 * 30)
    forecaster.progress = lambda: {6: (1.0, 28.0)}
    outlook = forecaster.outlook(np.array([4, 6]))
    assert outlook is not None and outlook.seconds == pytest.approx(0.4 * 5 * 2)
    assert forecaster.report().under_way == (20.0, 8.0 + 28.0)
    assert report.is_alive and report.spent_s == 20.0


def test_rows_without_progress_run_beside_more_once_some_have_ended():
    forecaster, now = clocked([(0, 10)] * 400, end_s=100.0)
    for index in range(4):
        forecaster.meter.begin(index)
    assert forecaster.most_together == 4
    now[0] = 1.0
    forecaster.outlook(np.arange(400))
    for index in range(4):
        forecaster.meter.end(index)
    assert forecaster.most_together == int(0.7 * 4 * (99.0 - 2.016))


def test_slow_first_steps_do_not_say_that_no_row_could_end():
    forecaster, now = clocked([(100, 128)] * 400, end_s=40.0)
    for index in range(4):
        forecaster.meter.begin(index)
    now[0], forecaster.progress = 10.0, lambda: dict.fromkeys(range(4), (1.0, 1.0))
    forecaster.outlook(np.arange(400))
    assert forecaster.most_together == 4
    for second in range(11, 21):
        now[0], forecaster.progress = float(second), lambda at=second: dict.fromkeys(range(4), (1.0, 8.0 * (at - 10)))
        forecaster.outlook(np.arange(400))
    assert 1 <= forecaster.most_together < 10


def test_a_run_whose_end_held_back_rows_foresees_nothing_by_the_steps_of_few():
    how = {"num_rows": 256, "workers": ((128, 1.0),), "rows_stop": False, "most": (128,), "step_s": 1e-3, "row_s": 3e-3}
    (worker,) = SimulatedJob(seeded(0), within_s=12.0, **how).workers
    assert worker.num_done > 10 and worker.forecaster.report().throughput is None


def lognormal(random: np.random.Generator, num_rows: int) -> np.ndarray:
    return random.lognormal(4.0, 0.8, num_rows)


def alike(random: np.random.Generator, num_rows: int) -> np.ndarray:
    return random.normal(100, 20, num_rows)


FEW_WAVES = {
    "four waves": {"num_rows": 60},
    "four waves of rows that write all": {"num_rows": 60, "rows_stop": False},
    "one wave": {"num_rows": 64, "workers": ((64, 1.0),)},
    "one wave of rows alike": {"num_rows": 64, "workers": ((64, 1.0),), "most": (1024,), "lengths": alike},
    "three waves in step": {"num_rows": 350, "workers": ((128, 1.0),), "rows_stop": False, "most": (128,)},
    "rows alike, far from their limit": {"num_rows": 300, "workers": ((64, 1.0),), "most": (1024,), "lengths": alike},
    "a few long rows": {"num_rows": 300, "workers": ((64, 1.0),), "most": (512, 1024), "lengths": lognormal},
    "steps that take as long as rows are many": {
        "num_rows": 300,
        "workers": ((64, 1.0),),
        "step_s": 1e-3,
        "row_s": 3e-3,
    },
}


@pytest.mark.parametrize("kind", FEW_WAVES)
def test_ranges_hold_the_end_from_the_first_shown_on(kind):
    """Nothing is shown before a tenth of the rows that run together have ended."""
    holds = []
    for seed in range(2):
        job = SimulatedJob(seeded(seed), **FEW_WAVES[kind])
        early = [each for each in job.forecasts if each.at_s < job.end_s]
        assert all(outlook.low_s <= outlook.seconds <= outlook.high_s for _, outlook in early)
        holds += [at_s + outlook.low_s <= job.end_s <= at_s + outlook.high_s for at_s, outlook in early]
    assert holds and np.mean(holds) >= 0.95


@pytest.mark.parametrize("kind", [kind for kind in FEW_WAVES if "wave" not in kind])
def test_a_plan_after_a_run_of_a_tenth_of_the_job_holds_the_rest(kind):
    """Rows of the run that did not end keep their tokens, and count."""
    whole_s = SimulatedJob(seeded(0), **FEW_WAVES[kind]).end_s
    first = SimulatedJob(seeded(0), within_s=whole_s / 5, **FEW_WAVES[kind])
    rest = SimulatedJob(seeded(0), goes_on=first, **FEW_WAVES[kind])
    plan = Forecaster(first.tokens, clock=lambda: 0.0)
    plan.kept = first.kept
    plan.tell([dataclasses.replace(worker.forecaster.report(), is_alive=False) for worker in first.workers])
    outlook = plan.outlook(np.flatnonzero(~first.done))
    assert outlook is None or outlook.low_s < rest.end_s < outlook.high_s


def test_in_a_first_run_only_as_many_rows_are_begun_together_as_can_end():
    """In a quarter of what 128 rows take together, none of them would end."""
    how = {"num_rows": 256, "workers": ((128, 1.0),), "rows_stop": False, "most": (128,), "step_s": 1e-3, "row_s": 3e-3}
    job = SimulatedJob(seeded(0), within_s=12.0, **how)
    (worker,) = job.workers
    assert 4 < worker.most_running < 40 and worker.num_done > 10
