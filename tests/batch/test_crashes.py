"""Killed anywhere and started again, a job has the bytes of one that was never killed, and each row has one line."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.batch.fake_llm import json_lines
from tests.batch.job import Job
from tests.batch.kill_demo import kill
from tests.batch.running import num_lines
from tests.forked import call
from tests.histories import seeded
from tests.marks import few


def start(job: Job) -> int:
    """The id of a process that runs the job."""
    if pid := os.fork():
        return pid
    code = 9
    try:
        code = job.run(on_step=lambda llm: time.sleep(0.005), flush_s=0.02, expiry_s=60.0)
    finally:
        os._exit(code)


@pytest.mark.parametrize("kills", few([4, 60]))
def test_real_processes_that_are_killed_in_turn(tmp_path, kills):
    """All other kills are histories of tests/world, and pages that no kill of a process can lose."""
    call(kill_in_turn, tmp_path, kills, seeded(1))


def kill_in_turn(folder: Path, kills: int, seed: int) -> None:
    """In a process whose jax has no threads yet, for it forks."""
    chance = random.Random(seed)
    job = Job(folder, json_lines({"custom_id": str(i), "prompt": f"{i} " * 9} for i in range(100)))
    expected, num_killed = job.whole(), 0
    while num_killed < kills:
        pids = [start(job), start(job)]
        for pid in pids:
            time.sleep(chance.uniform(0.0, 0.2))
            os.kill(pid, signal.SIGKILL)
            num_killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
        if chance.random() < 0.5:
            assert {os.waitpid(start(job), 0)[1] for _ in range(2)} == {0}
            assert job.output.read_bytes() == expected and set(num_lines(job.output).values()) == {1}
            job.forget()


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
