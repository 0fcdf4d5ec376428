"""Jobs that end by a deadline or a budget: in order, with code 75, a partial output, and a next start that goes on."""

import io
import json
import time
from pathlib import Path

import pytest

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import Forecaster, WorkerReport
from ferrum_jax.batch.deadline.row_meter import RowMeter, Throughput
from ferrum_jax.batch.job import EXIT_OK, EXIT_PREEMPTED, JobOptions
from ferrum_jax.batch.notice import Notice
from ferrum_jax.batch.worker_reports import WorkerReports, earlier_reports
from ferrum_jax.io.files.store import LocalStore
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.running import run_rows
from tests.support import INVARIANT, small_llm

NUM_ROWS = 200


class EndedJob:
    """A job over an engine whose steps take `step_s`."""

    def __init__(self, folder: Path, step_s: float = 0.004, num_rows: int = NUM_ROWS) -> None:
        self.folder, self.step_s, self.shown, self.num_models = folder, step_s, "", 0
        rows = [
            {"custom_id": str(i), "prompt": f"{i} " * 9, "max_tokens": 8, "priority": 1 - int(i >= num_rows - 16)}
            for i in range(num_rows)
        ]
        (folder / "in.jsonl").write_bytes(json_lines(rows))

    def run(self, *, output: str = "out.jsonl", **terms: float) -> int:
        """terms: of EndTerms, but within_s for a deadline."""
        within_s = terms.pop("within_s", None)
        deadline = None if within_s is None else time.time() + within_s
        shown = io.StringIO()
        options = JobOptions(terms=EndTerms(deadline=deadline, **terms))
        code = run_rows(self.folder, self._model, output, shown=shown, options=options)
        self.shown = " ".join(shown.getvalue().split())
        return code

    def _model(self, start: object) -> FakeLLM:
        self.num_models += 1
        return FakeLLM(on_step=lambda llm: time.sleep(self.step_s))

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.folder / name).read_bytes().splitlines()]

    @property
    def report(self) -> dict:
        return json.loads((self.folder / "out.jsonl.report.json").read_bytes())


def test_at_its_deadline_a_job_stops_with_75_and_a_partial_output_and_then_goes_on(tmp_path):
    job = EndedJob(tmp_path)
    assert job.run(output="whole.jsonl") == EXIT_OK
    started_s = time.monotonic()
    assert job.run(within_s=1.0) == EXIT_PREEMPTED
    assert 0.5 < time.monotonic() - started_s < 2.5  # a busy machine takes its time to write
    assert "Ends by " in job.shown and "Stopped: the time of this run ends" in job.shown
    assert not (tmp_path / "out.jsonl").exists()
    whole = {line["custom_id"]: line for line in job.lines("whole.jsonl")}
    partial = job.lines("out.jsonl.journal/partial.out.jsonl")
    assert 16 < len(partial) < NUM_ROWS and all(line == whole[line["custom_id"]] for line in partial)
    numbers = [int(line["custom_id"]) for line in partial]
    assert numbers == sorted(numbers)
    assert numbers[-16:] == list(range(NUM_ROWS - 16, NUM_ROWS))  # of the lower priority number
    assert set(range(len(numbers) - 16 - 24)) < set(numbers)  # then the order of the input, part by part
    assert job.report["ending"]["partial"].endswith("out.jsonl.journal/partial.out.jsonl")
    assert job.report["rows"]["ok"] == len(partial) and "the time of this run ends" in job.report["runs"][0]["ended"]
    assert job.run(within_s=60.0) == EXIT_OK
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert job.report["ending"]["partial"] is None
    assert not list((tmp_path / "out.jsonl.journal").glob("partial*")), "it says less than the output"


def test_a_budget_counts_what_earlier_runs_cost_and_a_higher_one_goes_on(tmp_path):
    """A second costs 1."""
    job = EndedJob(tmp_path)
    assert job.run(budget=1.0, price_per_hour=3600.0) == EXIT_PREEMPTED
    assert "Costs at most 1.00 at 3,600.00 an hour." in job.shown and "Stopped: the job's budget" in job.shown
    assert 0.5 < job.report["ending"]["cost"] < 2.0  # a busy machine takes its time to write
    assert "cost of all runs" in job.shown
    done, num_models = job.report["rows"]["ok"], job.num_models
    assert "with a higher --budget goes on with the rest" in job.shown or "before the rows that are left" in job.shown
    with pytest.raises(
        ValueError, match=r"the job has cost \d\.\d+ of its budget of 0\.50, .*; give a higher --budget"
    ):
        job.run(budget=0.5, price_per_hour=3600.0)
    assert job.num_models == num_models
    assert job.report["rows"]["ok"] == done > 0
    assert job.run(budget=100.0, price_per_hour=3600.0) == EXIT_OK
    assert job.report["ending"]["cost"] > 1.0 and "of it spent" in job.shown


def test_rows_that_are_passed_over_run_before_those_behind_them_once_they_fit(tmp_path, monkeypatch):
    job, begun = EndedJob(tmp_path, step_s=0.0), list[int]()
    begin = RowMeter.begin
    monkeypatch.setattr(Forecaster, "fits", lambda forecaster, index: index not in range(20, 70) or len(begun) >= 100)
    monkeypatch.setattr(RowMeter, "begin", lambda meter, index, kept: (begun.append(index), begin(meter, index))[1])
    assert job.run(within_s=600.0) == EXIT_OK and "Stopped" not in job.shown
    assert sorted(begun) == list(range(NUM_ROWS)) and begun[:100] != sorted(begun[:100])
    assert not set(range(20, 70)) & set(begun[:100]) and set(begun[100:150]) == set(range(20, 70))


def test_what_will_not_fit_is_said_at_the_next_start_before_the_model_loads(tmp_path):
    job = EndedJob(tmp_path, num_rows=600)
    assert job.run(within_s=2.5) == EXIT_PREEMPTED
    assert "Does not fit: what is left takes about" in job.shown  # as soon as it was measured
    assert job.run(within_s=1.2) == EXIT_PREEMPTED
    said, _, rest = job.shown.partition("Does not fit: what is left takes about")
    assert "rows" not in said.partition("Rows run by priority")[2] and "workers like this one would do it by" in rest
    job.step_s = 0.0
    assert job.run(within_s=600.0) == EXIT_OK and "Fits: what is left takes about" in job.shown


def test_the_progress_of_a_job_with_a_price_has_its_end_and_its_cost(tmp_path, monkeypatch):
    monkeypatch.setattr("ferrum_jax.batch.report.display.PLAIN_INTERVAL_S", 0.2)
    job = EndedJob(tmp_path)
    assert job.run(price_per_hour=3600.0) == EXIT_OK
    assert "left, ends " in job.shown and "; costs " in job.shown and "Rows run by priority" not in job.shown


def test_a_job_that_is_over_has_no_end_to_speak_of(tmp_path):
    job = EndedJob(tmp_path, step_s=0.0)
    assert job.run() == EXIT_OK and "ending" not in job.report
    assert job.run(within_s=5.0) == EXIT_OK and "Ends by" not in job.shown


def test_a_notice_without_urgency_leaves_time_to_write_and_a_signal_after_it_counts():
    notice = Notice()
    notice.give("the time ends", EXIT_PREEMPTED, is_urgent=False)
    assert notice.is_given and not notice.is_urgent
    notice.give("SIGTERM", 130)
    assert notice.reason == "the time ends" and notice.exit_code == EXIT_PREEMPTED


REPORT = WorkerReport(
    throughput=Throughput(1e-4, 1e-3, 0.05, 100),
    under_way=(5.0, 6.0),
    row_s=2.0,
    spent_s=30.0,
    price_per_hour=None,
    is_alive=True,
)


def test_workers_know_one_another_by_their_paces_while_they_live(tmp_path):
    store = LocalStore(tmp_path)
    living = {"one"}
    one, two = WorkerReports(store, "one"), WorkerReports(store, "two", lives=living.__contains__)
    one.write(REPORT)
    (found,) = two.others()
    assert found.throughput == REPORT.throughput and not found.is_alive  # of an earlier run, for all that is known
    one.write(WorkerReport(**{**vars(REPORT), "spent_s": 40.0}))
    (found,) = two.others()
    assert found.is_alive and found.spent_s == 40.0 and one.others() == []
    assert two.others()[0].is_alive and two.others()[0].worker == "one"
    living.clear()
    assert not two.others()[0].is_alive  # it was killed
    one.write(WorkerReport(**{**vars(REPORT), "spent_s": 50.0}))
    assert two.others()[0].is_alive
    one.write(WorkerReport(**{**vars(REPORT), "throughput": None}), ended=True)
    (found,) = two.others()
    assert (
        not found.is_alive and found.throughput is None and [each.spent_s for each in earlier_reports(store)] == [30.0]
    )
    WorkerReports(store, "three").write(REPORT)
    assert [each.worker for each in two.others() if each.is_alive] == ["three"]  # it appeared


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pace": null}', '{"pace": {"read_s": 1}}'])
def test_a_damaged_pace_says_nothing(tmp_path, content):
    (tmp_path / "paces").mkdir()
    (tmp_path / "paces" / "bad.json").write_text(content)
    assert earlier_reports(LocalStore(tmp_path)) == []


@pytest.mark.slow
def test_an_engine_stopped_at_a_deadline_goes_on_to_the_bytes_of_one_that_was_not(tmp_path):
    rows = [
        {"custom_id": str(i), "prompt_token_ids": [*range(6, 30), 40 + i % 200], "max_tokens": 24, "temperature": 0.8}
        for i in range(120)
    ]
    (tmp_path / "in.jsonl").write_bytes(json_lines(rows))
    llm = small_llm("qwen3", INVARIANT)

    def run(name: str, within_s: float | None) -> int:
        deadline = None if within_s is None else time.time() + within_s
        return run_rows(tmp_path, lambda start: llm, name, options=JobOptions(terms=EndTerms(deadline=deadline)))

    assert run("whole.jsonl", None) == EXIT_OK
    whole_s = json.loads((tmp_path / "whole.jsonl.report.json").read_bytes())["wall_s"]
    assert run("out.jsonl", max(whole_s / 3, 0.5)) == EXIT_PREEMPTED
    partial = (tmp_path / "out.jsonl.journal" / "partial.out.jsonl").read_bytes().splitlines()
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert 0 < len(partial) < len(rows) and set(partial) < set(whole.splitlines())
    assert run("out.jsonl", 600.0) == EXIT_OK and (tmp_path / "out.jsonl").read_bytes() == whole
