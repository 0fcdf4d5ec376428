"""What a person sees of a job: the bar or the lines while it runs, and the plots of its page."""

from __future__ import annotations

import io
import re
import time

from rich.console import Console

from ferrum_jax.batch.report.display import Display, Tally
from ferrum_jax.batch.report.page import page
from ferrum_jax.batch.report.plots import figures
from ferrum_jax.batch.report.recorder import FIELDS, SPECULATION, Recorder, media_of, report


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
