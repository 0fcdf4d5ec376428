"""Four unlike workers, killed and started again, end a job; one that cannot end in time says so and stops in order."""

import functools

import pytest

from tests.batch.running import run_program
from tests.histories import seeded

pytestmark = pytest.mark.slow


run = functools.partial(run_program, "tests.batch.hundred_program")


@pytest.mark.parametrize(
    ("rows", "seconds", "kills"),
    [pytest.param(3000, 40, 4, id="3000"), pytest.param(100_000, 360, 10, id="100000", marks=pytest.mark.long)],
)
def test_four_unlike_workers_that_are_killed_and_started_again_answer_each_row_once(rows, seconds, kills):
    how = {"rows": rows, "seconds": seconds, "kills": kills, "slack": 4, "seed": seeded(1)}
    found, said = run(*(f"--{name}={value}" for name, value in how.items()))
    assert found["codes"] == [0, 0, 0, 0] and len(found["killed"]) + found["not_killed"] == kills
    assert sum(found["starts"]) == 8 + len(found["killed"])  # of the other job and of this one
    assert found["rows"] == rows and found["most_lines_of_a_row"] == 1 and not found["partial_output"]
    assert found["torn_files"] == found["processes_left"] == 0
    assert "expected time of one worker, by another job here" in said


def test_a_deadline_that_cannot_be_kept_is_said_at_the_start_and_all_stop_in_order():
    found, said = run("late", "--rows=400", "--seconds=16")
    assert found["codes"] == [[75], [75, 75, 75, 75]] and not found["output"]
    assert found["workers_said_at_start"] > 4 and "Does not fit" in said
    assert found["partial"] and 0 < found["partial_rows"] == found["done_rows"] < found["rows"]
