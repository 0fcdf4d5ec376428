"""What a person sees of a job: the bar or the lines while it runs, and the plots of its page.

The summary, the report and the page say the same of a whole job.
"""

import html
import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_OK,
    EXIT_ROWS_FAILED,
    run_batch,
)
from ferrum_jax.batch.report.display import Display, Tally
from ferrum_jax.batch.report.page import page
from ferrum_jax.batch.report.plots import figures
from ferrum_jax.batch.report.recorder import FIELDS, SPECULATION, Recorder, media_of, report
from ferrum_jax.io.files.store import open_store, split
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.job import BAD_LINES, GOOD_INPUT, ROWS, Job


def bar_of(tally: Tally) -> str:
    """What a terminal of 80 columns has got after a look, without its escapes."""
    shown = io.StringIO()
    with Display(Console(file=shown, width=80, force_terminal=True), tally) as display:
        display._shown_s -= 1e3
        display.update()
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown.getvalue())


def test_at_80_columns_the_bar_shows_rows_both_times_and_all_rates():
    tally = Tally(num_rows=1_000_000, num_ok=999_999, num_prompt_tokens=10**9, num_output_tokens=10**8)
    tally.pool_use, tally.padding_waste = 1.0, 0.125
    lines = bar_of(tally).replace("\r", "").splitlines()
    bar = next(line for line in lines if "rows" in line)
    assert "999999/1000000" in bar and re.search(r"\d:\d\d:\d\d gone, (-:--:--|\d:\d\d:\d\d) left$", bar.rstrip())
    text = " ".join(lines)
    assert "tok/s in" in text and "out, 0% reused, pool 100%, padding 12%" in text and "\u2026" not in text


def test_a_log_gets_a_line_for_each_look_however_long_it_is():
    shown = io.StringIO()
    tally = Tally(num_rows=1_000_000, num_ok=999_999, num_prompt_tokens=10**9, num_output_tokens=10**9)
    with Display(Console(file=shown, width=80), tally) as display:
        display._shown_s -= 1e3
        display.update()
        display.say("the engine crashed " * 9)
        tally.num_ok, tally.started_s = 1_000_000, time.monotonic() - 3_725
    first, second, last = shown.getvalue().splitlines()
    assert first.startswith("999999/1000000 rows, ") and first.endswith(" unknown") and second.count("crashed") == 9
    assert last.startswith("1000000/1000000 rows, ") and last.endswith("done in 1:02:05")


def test_a_job_over_sooner_than_its_first_line_leaves_the_table_alone():
    shown = io.StringIO()
    with Display(Console(file=shown, width=80), Tally(num_rows=2, num_ok=2)) as display:
        display.update()
    assert shown.getvalue() == ""


def test_the_clock_of_the_bar_is_that_of_the_table():
    tally = Tally(num_rows=4, num_ok=1)
    tally.started_s = time.monotonic() - 3_600
    assert "1:00:00 gone" in bar_of(tally)


def test_a_run_keeps_few_samples_and_runs_of_older_versions_are_plotted_too():
    tally = Tally(num_rows=1_000)
    recorder = Recorder(tally, interval_s=0.0)
    for number in range(1_000):
        tally.num_own = number
        tally.started_s = time.monotonic() - number / 50
        recorder.sample(fake_stats)
    stats = fake_stats() | {"startup_s": 20.0}
    run = recorder.run("one", "all done", stats, journal_s=0.0)
    assert len(run["samples"]["values"]) <= 400
    old = dict(run)
    old["samples"] = {
        "fields": [*FIELDS, "executables_missing"],  # which once was among them
        "values": [[*values, 0] for values in run["samples"]["values"]],
    }
    assert figures([run]).count("<figure>") == figures([old, run]).count("<figure>") == 4


def fake_stats() -> dict[str, int]:
    return {"live": 5, "num_blocks": 10, "padded_tokens": 8, "computed_tokens": 6}


def drafting_run(lengths: list[float]) -> dict:
    """A run of an engine that drafts 4 tokens at each of 10 steps before a sample; `lengths` of them stand."""
    tally = Tally(num_rows=1_000)
    recorder = Recorder(tally, interval_s=0.0)
    stats = fake_stats() | dict.fromkeys(SPECULATION, 0)
    for number, length in enumerate(lengths):
        tally.started_s, tally.num_own = time.monotonic() - number, number
        stats["speculation_steps"] += 10
        stats["drafted_tokens"] += 40
        stats["accepted_tokens"] += int(10 * length)
        recorder.sample(lambda: stats)
    return recorder.run("one", "all done", stats, journal_s=0.0)


def accepted(runs: list[dict]) -> list[float]:
    """The heights of the line of accepted tokens, as shares of a scale that ends at 4."""
    (shown,) = [part for part in figures(runs).split("<figure>") if "Accepted length, tokens of a draft" in part]
    points = re.search(r'<polyline class="a" points="([^"]*)"', shown)
    assert points is not None and ">4</text>" in shown
    return [round(4 * (212 - float(point.split(",")[1])) / 200, 1) for point in points[1].split()]


def test_the_accepted_length_is_plotted_where_tokens_were_drafted():
    assert accepted([drafting_run([0.0, 1.0, 3.5, 0.0])]) == [1.0, 3.5, 0.0]
    assert "Accepted length" not in figures([plain_run()])
    assert figures([plain_run()]).count("<figure>") == 4


def test_the_accepted_length_goes_on_over_runs_and_engines():
    first, second = drafting_run([2.0, 2.0, 2.0]), drafting_run([1.0, 1.0, 1.0])
    assert accepted([first, plain_run(), second]) == [2.0, 2.0, 1.0, 1.0, 1.0]
    values = first["samples"]["values"] + second["samples"]["values"]  # another engine in one run, which counts anew
    both = {**first, "samples": {**first["samples"], "values": values}}
    assert accepted([both]) == [2.0, 2.0, 1.0, 1.0]


def plain_run() -> dict:
    """A run of an engine that does not count drafts."""
    recorder = Recorder(Tally(num_rows=1_000), interval_s=0.0)
    for _ in range(4):
        recorder.sample(fake_stats)
    return recorder.run("one", "all done", fake_stats(), journal_s=0.0)


def test_a_report_adds_up_what_its_runs_saw_and_heard():
    tally = Tally(num_rows=2, num_ok=2)
    heard = fake_stats() | {"sounds_encoded": 4, "sound_hits": 0, "sound_s": 95.25}
    runs = [Recorder(tally).run(f"w{number}", "done", heard, journal_s=0.0) for number in (0, 1)]
    found = report("out.jsonl", 0, tally, runs, num_invalid=0, errors=[])
    assert found["media"] == {"sounds_encoded": 8, "sound_s": 190.5}
    assert "<td>sound s</td><td>190.5</td>" in page(found)
    assert media_of(fake_stats()) == {}


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


def test_a_terminal_gets_a_bar_with_rates(job):
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
    monkeypatch.setattr("ferrum_jax.batch.report.recorder._MIN_KEPT_S", 0.0)
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
