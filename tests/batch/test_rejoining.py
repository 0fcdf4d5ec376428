"""A worker of the engine itself runs rows that another gives back beside its own long ones, which go on from their
tokens."""

import dataclasses
import time
from pathlib import Path

import pytest

from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import EXIT_OK, JobOptions
from ferrum_jax.batch.journal.journal import OK, PARTIAL, Journal
from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.batch.worker_reports import WorkerReports
from ferrum_jax.io.files.store import LocalStore
from ferrum_jax.runtime.runner import Runner
from tests.batch.fake_llm import json_lines
from tests.batch.running import run_rows
from tests.support import INVARIANT, small_llm

pytestmark = pytest.mark.slow
IN_PART, LONG = 8, (6, 7)  # rows of a part; those of the first that take 150 steps
SLOW = WorkerReport(
    throughput=Throughput(0.0, 100.0, 0.05, 9), row_s=1e4, spent_s=0.0, price_per_hour=None, is_alive=True
)


class SlowWorker:
    """Has the second part of the job in `folder` until the other worker runs its last rows, and gives it back then."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "in.jsonl", "rb") as file:
            layout = Rows(file, 0, ["tiny"]).part_layout
        store = LocalStore(folder / "out.jsonl.journal")
        self._leases, self._reports = Leases(store, "slow", layout, expiry_s=60.0), WorkerReports(store, "slow")
        assert self._leases.acquire("1") == 1
        self.num_steps, self.has_given = 0, False

    def step(self) -> None:
        """Beside each step of the other."""
        self.num_steps += 1
        self._reports.write(dataclasses.replace(SLOW, spent_s=float(self.num_steps), num_slots=8, num_queued=IN_PART))
        runs = [each.num_running for each in self._reports.others() if not each.num_queued]
        if not self.has_given and runs == [len(LONG)]:
            self._leases.give("1", 2)
            self.has_given = True


def run(folder: Path) -> None:
    options = JobOptions(share_s=0.01, poll_s=0.01)
    assert run_rows(folder, lambda start: small_llm("qwen3", INVARIANT), options=options) == EXIT_OK


def write_rows(path: Path) -> None:
    rows = [
        {"custom_id": str(i), "prompt_token_ids": [*range(6, 40), 50 + i], "temperature": 0.8, "logprobs": 2}
        | {"max_tokens": 150 if i in LONG else 6, "ignore_eos": True, "priority": i // IN_PART}
        for i in range(2 * IN_PART)
    ]
    path.write_bytes(json_lines(rows))


def test_rows_that_another_gives_back_join_those_that_run_and_each_has_its_bytes(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    for folder in (tmp_path, tmp_path / "whole"):
        write_rows(folder / "in.jsonl")
    run(tmp_path / "whole")
    monkeypatch.setattr("ferrum_jax.batch.timekeeper._MAX_LOOKING", 0)  # however long a look takes
    dispatch, append, records = Runner.dispatch, Journal.append, list[tuple[bytes, int]]()
    made: list[SlowWorker] = []

    def slowly(self, plan, *more):
        made[:] = made or [SlowWorker(tmp_path)]
        made[0].step()
        time.sleep(0.01)
        return dispatch(self, plan, *more)

    def noted(self, kind, index, *more):
        records.append((kind, index))
        append(self, kind, index, *more)

    monkeypatch.setattr(Runner, "dispatch", slowly)
    monkeypatch.setattr(Journal, "append", noted)
    run(tmp_path)
    assert made[0].has_given
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
    assert {index for kind, index in records if kind == PARTIAL} == set(LONG)  # when the engine was left
    ended = [index for kind, index in records if kind == OK]
    assert sorted(ended) == list(range(2 * IN_PART)) and set(ended[-2:]) == set(LONG)
