"""What a job says of itself: its summary, its report and the page of it."""

import html
import io
from pathlib import Path

import pytest
from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_OK,
    EXIT_ROWS_FAILED,
    run_batch,
)
from ferrum_jax.batch.report.page import page
from ferrum_jax.io.files.store import open_store, split
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.job import BAD_LINES, GOOD_INPUT, ROWS, Job


def test_the_summary_counts_rows_and_tokens(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run()
    cells = {}
    for line in job.shown.getvalue().splitlines():
        parts = [part.strip() for part in line.split("\u2502") if part.strip()]
        if len(parts) == 2:
            cells[parts[0]] = parts[1]
    assert cells["rows ok"] == "5" and cells["rows failed"] == "1" and cells["rows left"] == "0"
    usages = [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert cells["tokens in"] == str(sum(usage["prompt_tokens"] for usage in usages))
    assert cells["tokens out"] == str(sum(usage["completion_tokens"] for usage in usages))


def test_a_terminal_gets_a_bar_with_rates(tmp_path):
    job = Job(tmp_path)
    shown = io.StringIO()
    console = Console(file=shown, width=140, force_terminal=True)
    assert run_batch(FakeLLM, job.input, job.output, model="tiny", console=console) == EXIT_OK
    assert "5/5" in shown.getvalue() and "tok/s" in shown.getvalue() and "reused" in shown.getvalue()


def test_the_report_has_every_run_and_the_page_needs_nothing_beside_it(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run_to_step(3)
    assert job.run() == EXIT_ROWS_FAILED
    report = job.report()
    assert report["rows"] == {"all": 6, "ok": 5, "failed": 1, "invalid": 1, "unrecorded": 0}
    assert report["created"] == 1_000
    assert sorted(run["ended"] for run in report["runs"]) == ["all done", "the test"]
    usages = [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert report["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert 0 < report["cached_tokens"] < report["prompt_tokens"] and b"cached" not in job.output.read_bytes()
    values = [[t, t * 3, t * 90, t * 40, t * 50, 0.5, 0.25, t * 90, t * 50] for t in range(300)]
    for run in report["runs"]:
        run["samples"]["values"] = values
    for place in (str(tmp_path / "report.html"), f"memory://{tmp_path}/report.html"):
        assert job.run(page_path=place) == EXIT_ROWS_FAILED
        folder, name = split(place)
        assert f"Batch job {job.output}".encode() in open_store(folder).read(name)
    shown = page(report)
    assert shown.count("<svg") == 4 and shown.count("<polyline") == 7 and "<script" not in shown
    assert "http" not in shown and f"Batch job {job.output}" in shown and 'content="width=device-width' in shown
    hits = shown.split("Prompt tokens from the prefix cache")[1].split("</figure>")[0]
    assert ",123.1" in hits and ">100</text>" in hits  # 44.4 % of the scale
    assert len(shown) < 40_000
    for run in report["runs"]:  # rows are durable, and so counted, at every fourth sample
        run["samples"]["values"] = [[t, t // 4 * 12, t * 300, 0, t * 30, 0.5, 0.25, 0, 0] for t in range(100)]
    assert ">100</text>" in page({**report, "runs": report["runs"][:1]}).split("Tokens a row")[1]


def test_rows_of_all_runs_add_up_however_the_job_was_stopped(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run_to_step(3)
    job.run(limit=5)  # rows fail here, too
    report = job.report()
    rows, (first, second) = report["rows"], report["runs"]
    assert rows["all"] == rows["ok"] + rows["failed"] == 6 and rows["failed"] > rows["invalid"] == 1
    assert 0 < first["rows"] < 5 and first["rows"] + second["rows"] == 5 and rows["unrecorded"] == 0
    for run, last in ((run, run["samples"]["values"][-1]) for run in report["runs"]):
        assert last[1] <= run["rows"]
    Path(f"{job.output}.journal/runs/{first['worker']}.json").unlink()  # as if it had been killed
    job.run()
    report = job.report()
    assert report["rows"] == {**rows, "unrecorded": first["rows"]}
    shown = page(report)
    tokens = [first["prompt_tokens"], "", first["output_tokens"]]
    cells = "".join(f"<td>{each}</td>" for each in ("killed, no record", "", "", first["rows"], *tokens))
    assert cells in shown and report["output_tokens"] == first["output_tokens"] + second["output_tokens"]
    assert "<td>all</td><td></td><td></td><td>6</td>" in shown


class Killed(BaseException):
    """As SIGKILL: nothing is written any more."""


def test_the_report_of_a_job_that_was_killed_counts_the_tokens_of_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("ferrum_jax.batch.report.recorder._LEAST_KEPT_S", 0.0)
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])

    def killed(llm: FakeLLM) -> None:
        if llm.num_answered >= 2:
            raise Killed

    with pytest.raises(Killed):
        job.run(on_step=killed)
    assert job.run() == EXIT_ROWS_FAILED
    report, usages = job.report(), [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert report["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert report["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    first, second = sorted(report["runs"], key=lambda run: run["ended"], reverse=True)
    assert first["ended"] == "killed, or still at work" and second["ended"] == "all done" and second["rows"] < 5
    assert report["wall_s"] == first["wall_s"] + second["wall_s"] and report["rows"]["ok"] == 5


def test_the_page_names_model_settings_and_errors_and_what_users_wrote_is_text_on_it(tmp_path):
    evil = "<script>alert('x')</script>&\"'"
    mine = [row for row in ROWS if "body" not in row]  # the others name their model
    rows = [*mine, {"custom_id": evil, "prompt": "much too long", "max_tokens": 30}]
    job = Job(tmp_path, json_lines(rows) + BAD_LINES[1])
    job.output = tmp_path / "<b>out.jsonl"
    job.run_to_step(2, model=evil)
    stopped = job.report()
    assert "stopped: the test; " in page(stopped) and stopped["errors"] == []
    assert job.run(model=evil, limit=8) == EXIT_ROWS_FAILED
    report = job.report()
    assert [error["code"] for error in report["errors"]] == ["invalid_json", "invalid_request"]
    report["identity"]["odd <i>"] = {"nested": "<u>"}
    report["environments"] = [{"mesh": "<mesh>"}, {"mesh": "tp=2"}]
    report["identity"]["long"] = "<u>" + "flag " * 50
    report["differing_bits"] = ["mesh '<mesh>' and 'tp=2'"]
    shown = page(report)
    assert html.escape(evil) in shown and "complete, 2 rows failed" in shown
    assert "the prompt has 13 tokens, more than 8" in shown and "line 6: " in shown
    for text in ("<script", "<b>o", "<i>", "<u>", "<mesh>"):
        assert text not in shown, text
    assert "Environment 2" in shown and "Bits may differ" in shown
    assert html.escape(report["identity"]["long"]) in shown


def test_the_page_counts_hidden_errors_and_plots_nothing_without_a_run(tmp_path):
    job = Job(tmp_path, BAD_LINES[1] * 30)
    assert job.run() == EXIT_ROWS_FAILED
    report = job.report()
    shown = page(report)
    assert len(report["errors"]) == 20 and "10 more; each has its line in the output of the complete job." in shown
    assert "<svg" not in shown and "too short for plots" in shown
