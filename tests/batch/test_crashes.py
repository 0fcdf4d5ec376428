"""Killed anywhere and started again, a job has the bytes of one that was never killed, and each row has one line."""

import pytest

from tests.batch.kill_demo import kill
from tests.batch.running import run_program
from tests.batch.unlike_program import NUM_ROWS
from tests.histories import seeded


def run(*arguments: str) -> dict:
    return run_program("tests.batch.crash_program", *arguments)[0]


@pytest.mark.parametrize(
    ("kills", "seed"), [pytest.param(20, 1, id="20"), pytest.param(1000, 2, id="1000", marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(kills, seed):
    found = run("random", "--kills", str(kills), "--seed", str(seeded(seed)))
    assert found["kills"] == kills and found["partials"] > kills


@pytest.mark.parametrize("stride", [pytest.param(12, id="some"), pytest.param(1, id="each", marks=pytest.mark.slow)])
def test_killed_before_and_after_the_calls_that_make_a_write_durable(stride):
    assert (
        run("boundaries", "--stride", str(stride))["kills"] > 40 // stride
    )  # how many calls there are depends on how many segments the time allows


@pytest.mark.parametrize("kills", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_two_workers_that_share_a_job_and_are_killed_in_turn(kills):
    assert run("workers", "--kills", str(kills))["kills"] >= kills


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.long)])
def test_unlike_workers_of_which_one_is_killed_as_it_takes_or_gives_rows(kills):
    assert run("unlike", "--kills", str(kills))["kills"] == kills


def test_a_slow_worker_hands_over_its_last_rows_with_their_tokens_and_ends():
    """Where fast ones have room for all that are left."""
    found, _ = run_program("tests.batch.unlike_program")
    assert found["codes"] == [0, 0] and found["lines"] == NUM_ROWS and found["most_lines_of_a_row"] == 1
    assert found["ended_early"] and found["partials"] > 0


@pytest.mark.parametrize("stops", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_a_worker_that_sleeps_longer_than_its_leases_last_is_replaced_and_harmless(stops):
    run("stopped", "--kills", str(stops))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.long)])
def test_a_job_of_the_demo_model_that_is_killed(tmp_path, kills):
    found = kill(tmp_path, kills, seed=seeded(1))
    assert found["killed"] + found["terminated"] == kills and found["killed"] > 2 and found["terminated"] > 2
    assert 0 < found["saved_prefixes"] <= found["terminated"]


@pytest.mark.slow
def test_a_job_in_steps_of_hundreds_of_tokens_that_is_killed(tmp_path):
    """Prompts of 36 rows share a step of 512 tokens; alone, what goes on after a kill has one of 64."""
    found = kill(tmp_path, 10, seed=seeded(1), is_wide=True)
    assert found["killed"] + found["terminated"] == 10 and found["rows_that_differ"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_without_equal_bits_each_row_has_one_line_that_never_changes(tmp_path):
    found = kill(tmp_path, 10, seed=seeded(1), is_invariant=False)
    assert found["killed"] + found["terminated"] == 10 and found["rows"] == 10 * found["jobs"] > 0
