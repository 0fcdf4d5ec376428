"""Unlike workers share a job by their rates: they end together, and the slow ones hand over what is left at the end."""

import numpy as np
import pytest

from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.deadline.workers import Workers
from tests.batch.deadline.simulated_job import SimulatedJob
from tests.histories import seeded
from tests.marks import few

RATES = (1.0, 2.0, 4.0, 8.0)
UNLIKE = tuple((16, rate) for rate in RATES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_workers_of_rates_1_to_8_end_together_and_as_soon_as_their_rates_add_up_to(seed):
    alone_s = SimulatedJob(seeded(seed), num_rows=12000).end_s
    job = SimulatedJob(seeded(seed), num_rows=12000, workers=UNLIKE)
    assert job.done.all() and sum(worker.num_done for worker in job.workers) == 12000
    assert job.end_s < 1.05 * alone_s / sum(RATES)
    ends = [worker.ended_s for worker in job.workers]
    assert min(ends) > 0.9 * job.end_s
    shares = np.array([worker.num_done for worker in job.workers]) / 12000
    assert shares == pytest.approx(np.array(RATES) / sum(RATES), abs=0.03)


def worker(name: str, row_s: float, **more: int | float) -> WorkerReport:
    """A worker that takes so long for a row, 8 at once."""
    about = {"row_s": 8 * row_s, "num_slots": 8, "is_alive": True, "worker": name, **more}
    return WorkerReport(throughput=Throughput(0.0, row_s, 0.05, 9), spent_s=9.0, price_per_hour=None, **about)


def together(own: WorkerReport, *others: WorkerReport) -> Workers:
    return Workers.of(own, others, mean=(10.0, 1.0), least_s=2.0)


SLOW, FAST = worker("slow", 1.0), worker("fast", 0.125)


def test_the_rows_that_are_left_are_run_by_the_fewest_and_fastest_workers():
    assert together(SLOW, FAST).finishers(8) == together(FAST, SLOW).finishers(8) == ["fast"]
    assert together(SLOW, FAST).finishers(9) == ["fast", "slow"] and together(SLOW, FAST).finishers(17) == []


def test_a_slow_worker_begins_no_row_that_would_end_long_after_all_others():
    assert together(SLOW, FAST).is_worthwhile(40) and not together(SLOW, FAST).is_worthwhile(39)
    assert together(SLOW, FAST).rows_to_take(900, 900) == 50
    assert together(SLOW, FAST).rows_to_take(10, 10) == 0 and together(FAST, SLOW).rows_to_take(10, 10) == 16
    assert together(SLOW, worker("dead", 0.125, is_alive=False)).rows_to_take(10, 10) == 10


def test_rows_that_were_not_begun_are_given_to_workers_that_have_room_by_their_rates():
    assert together(SLOW, FAST).rows_to_keep(90, 900) == 10
    assert together(SLOW, worker("fast", 0.125, num_running=8)).rows_to_keep(90, 900) == 90
    assert together(SLOW, FAST).rows_to_keep(1, 900) == 1  # it is not worth it


@pytest.mark.parametrize("slowed", few([3, 2]))
def test_what_a_worker_that_slows_to_half_cannot_do_others_take_over(slowed):
    """It slows in the middle. Ideal is when the rates then, added up, would be done."""
    alone_s = SimulatedJob(seeded(1), num_rows=6000).end_s
    half_s, left = alone_s / sum(RATES) / 2, sum(RATES) - RATES[slowed] / 2
    ideal_s = half_s + (alone_s - half_s * sum(RATES)) / left
    job = SimulatedJob(seeded(1), num_rows=6000, workers=UNLIKE, slows=(slowed, half_s, RATES[slowed] / 2))
    assert job.done.all() and job.end_s < 1.05 * ideal_s
    assert min(worker.ended_s for worker in job.workers) > 0.9 * job.end_s


@pytest.mark.slow
@pytest.mark.parametrize(("takes_s", "most"), [(0.3, 1.06), (1.5, 1.13)])
def test_where_a_look_at_others_is_dear_workers_look_seldom_and_still_end_together(takes_s, most):
    """As in a bucket. 1.5 s are looked for every 150 s, in a job that takes 170 s."""
    alone_s = SimulatedJob(seeded(0), num_rows=12000).end_s
    job = SimulatedJob(seeded(0), num_rows=12000, workers=UNLIKE, takes_s=takes_s)
    assert job.done.all() and job.end_s < most * alone_s / sum(RATES)
    assert min(worker.ended_s for worker in job.workers) > 0.9 * job.end_s
