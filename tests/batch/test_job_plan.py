"""The dry run counts what a job would do, writes nothing, and knows what is done."""

import argparse
import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ferrum_jax.batch import reach
from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import Outlook, WorkerReport
from ferrum_jax.batch.deadline.row_meter import Throughput
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import JobOptions, run_batch
from ferrum_jax.batch.job_plan import bounded_rows, make_plan, measured_outlook, outlook_rows, plan_table
from ferrum_jax.batch.reach import as_logged, reach_of
from ferrum_jax.batch.report.recorder import padding_waste
from ferrum_jax.cli.machine_throughput import MachineThroughput
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.io.files.store import LocalStore
from ferrum_jax.tasks.transcription.foreseen import ForeseenSound
from tests.batch.fake_llm import FakeLLM, json_lines

SHARED = list(range(64))


def lines() -> bytes:
    rows = [{"custom_id": f"s{i}", "prompt_token_ids": [*SHARED, 500 + i], "max_tokens": 5, "n": 2} for i in range(10)]
    rows += [{"custom_id": f"o{i}", "prompt_token_ids": [900 + i] * 40, "max_tokens": None} for i in range(3)]
    rows += [{"custom_id": "long", "prompt_token_ids": [1] * 95, "max_tokens": 6}]
    rows += [{"custom_id": "chat", "messages": [{"role": "user", "content": "hi"}]}]
    rows += [{"custom_id": "bad", "prompt": "x", "colour": 1}]
    return json_lines(rows)


def token_ids(content: list, kept: int | None = None) -> list[int]:
    if isinstance(content[0], dict):
        raise ValueError("there is no chat template")
    return content


def foresee(named: str, params: TranscriptionParams) -> ForeseenSound:
    """Sounds named by their seconds; those of others have no header."""
    if named == "damaged":
        raise ValueError("the sound is damaged")
    seconds = float(named) if named.isdecimal() else None
    count = 1 if seconds is None else math.ceil(seconds / 30)
    return ForeseenSound(seconds=seconds, num_windows=count, token_ids=[7] * (20 if params.prompt else 4))


def plan_of(folder: Path):
    with open(folder / "in.jsonl", "rb") as file:
        return make_plan(
            Rows(file), LocalStore(folder / "out.jsonl.journal"), token_ids, foresee, block_size=16, max_model_len=100
        )


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(lines())
    return tmp_path


def test_a_plan_counts_rows_tokens_and_shared_prefixes(folder):
    plan = plan_of(folder)
    assert (plan.num_rows, plan.num_bad, plan.num_refused, plan.num_done) == (16, 1, 2, 0)
    assert plan.prompt_tokens == 10 * 65 + 3 * 40 and plan.longest_prompt == 65
    assert plan.saved_tokens == 9 * 64 and (plan.num_groups, plan.num_grouped) == (1, 10)
    assert plan.most_output_tokens == 10 * 2 * 5 + 3 * 60
    assert len(plan.bad) == 1 and "line 16: colour is not known" in plan.bad[0]
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def outlook_of(folder: Path, terms: EndTerms, known: WorkerReport | None = None) -> tuple[Outlook, str] | None:
    with open(folder / "in.jsonl", "rb") as file:
        return measured_outlook(Rows(file), LocalStore(folder / "out.jsonl.journal"), terms, 0.0, known)


def test_a_plan_before_the_first_run_goes_by_another_job_with_a_wide_range(folder):
    throughput = Throughput(0.01, 0.1, 0.03, 500)
    known = WorkerReport(throughput=throughput, row_s=2.0, last_s=2.5, spent_s=9.0, price_per_hour=None)
    outlook, by = outlook_of(folder, EndTerms(price_per_hour=3600.0), known)
    reads, writes = 10 * 65 + 3 * 40 + 95, 10 * 2 * 5 + 3 * 1024 + 6
    assert by == "by another job here" and outlook.spent == 0.0
    assert outlook.seconds == pytest.approx(0.01 * reads + 0.1 * (writes + 1024) + 1.0, rel=0.01)
    assert outlook.high_s / outlook.seconds > 1.5 and outlook.cost == pytest.approx(outlook.seconds)


def test_a_plan_of_a_job_that_is_done_has_nothing_left_and_knows_its_cost(folder):
    terms = EndTerms(price_per_hour=3600.0)
    options = JobOptions(terms=terms)
    console = Console(file=io.StringIO())
    assert outlook_of(folder, terms) is None
    run_batch(FakeLLM, folder / "in.jsonl", folder / "out.jsonl", model="m", console=console, options=options)
    plan = plan_of(folder)
    assert plan.num_done == 15 and plan.prompt_tokens == plan.most_output_tokens == 0
    outlook, by = outlook_of(folder, terms)
    assert (
        by == "by earlier runs"
        and outlook.seconds < 1e-6
        and outlook.cost == pytest.approx(outlook.spent)
        and outlook.spent > 0
    )
    (path,) = (folder / "out.jsonl.journal/paces").iterdir()
    for content in ("", "[]", "{}", '{"pace": 1}', path.read_text().replace('"row_s": ', '"row_s": -')):
        path.write_text(content)
        assert outlook_of(folder, terms) is None


def test_the_table_says_all_of_it(folder):
    shown = Console(file=io.StringIO(), width=200)
    outlook = Outlook(
        seconds=7200.0, spread=0.1, low_s=6000.0, high_s=8640.0, cost=9.5, low_cost=8.0, high_cost=11.0, spent=1.5
    )
    terms = EndTerms(deadline=3600.0, price_per_hour=4.0)
    late = dataclasses.replace(outlook, fits=False, share=0.5, num_workers=3)
    shown.print(
        plan_table(plan_of(folder), {"KV pool": "1 MiB"}, outlook_rows(late, "by earlier runs", terms, 0.0), "in.jsonl")
    )
    text = re.sub(r"[│\s]+", " ", shown.file.getvalue())
    for part in (
        *("576 (74.8%)", "1 of 10 rows", "1 MiB", "line 16", "2:00:00 (1:40:00 to 2:24:00)"),
        *(
            "9.50 (8.00 to 11.00), 1.50 of it spent",
            "Ends by 1970-01-01 ",
            ", in 1:00:00.",
            "about 50% of it will be done",
        ),
        "3 workers like this one would do it",
    ):
        assert part in text


def test_the_table_shows_text_of_users_as_it_is(tmp_path):
    odd = "[/INST] [red]x[/red] :warning:"
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "prompt": "x", odd: 1}) + "\n")
    shown = Console(file=io.StringIO(), width=400)
    shown.print(plan_table(plan_of(tmp_path), {"executables": odd}, [(odd, odd)], odd))
    assert shown.file.getvalue().count(odd) == 5


def test_without_an_earlier_run_time_and_cost_are_bounded_by_the_device():
    def said(**terms: float) -> str:
        return "; ".join(f"{name}: {value}" for name, value in bounded_rows(7200.0, EndTerms(**terms), 1000.0))

    assert said() == "expected time: more than 7,200.0 s, by the device's own limits; a run will measure it"
    assert "expected cost: more than 8.00 at 4.00 an hour" in said(price_per_hour=4.0)
    assert "does not fit: 3 workers would be needed at the least" in said(deadline=4000.0)
    assert "does not fit: it costs more than the budget of 7.00" in said(price_per_hour=4.0, budget=7.0)
    assert "does not fit" not in said(deadline=9000.0, price_per_hour=4.0, budget=9.0)


def test_a_job_s_reach_is_that_of_all_its_rows_but_those_refused(folder):
    with open(folder / "in.jsonl", "rb") as file:
        rows = Rows(file)
        assert reach_of(rows, token_ids, 100, foresee) == Reach(
            num_rows=20 + 3, num_tokens=20 * (65 + 5) + 3 * 100, request_tokens=100
        )
        requests = as_logged(rows, token_ids, 100, foresee)
    assert sorted((len(r.prompt_token_ids), r.max_tokens, len(r.choices)) for r in requests) == [
        *[(40, 60, 1)] * 3,
        *[(65, 5, 2)] * 10,
    ]


def test_a_text_whose_vector_is_asked_for_is_measured_with_what_is_put_before_it():
    content = b'{"custom_id": "a", "input": [1, 2]}\n{"custom_id": "b", "prompt": [1], "max_tokens": 1}\n'

    def prompted(content: list, embeds: bool = False, kept: int | None = None) -> list[int]:
        return [*[9] * (70 * embeds), *content]

    found = reach_of(Rows(io.BytesIO(content)), prompted, 100, foresee)
    assert found == Reach(num_rows=2, num_tokens=73 + 2, request_tokens=73)


def test_a_job_of_very_many_rows_is_not_measured(folder, monkeypatch):
    monkeypatch.setattr(reach, "MAX_MEASURED", 14)
    with open(folder / "in.jsonl", "rb") as file:
        assert reach_of(Rows(file), token_ids, 100, foresee) is None


SOUNDS = [
    {"custom_id": "short", "file": "1", "max_tokens": 10},
    {"custom_id": "two", "method": "POST", "url": "/v1/audio/transcriptions"}
    | {"body": {"file": "31", "max_tokens": 10, "prompt": "Ångström"}},
    {"custom_id": "four", "file": "95"},
]


def sounds_in(folder: Path, *more: dict) -> Rows:
    (folder / "in.jsonl").write_bytes(json_lines([*SOUNDS, *more]))
    return Rows(io.BytesIO((folder / "in.jsonl").read_bytes()))


def test_each_window_of_a_sound_is_planned_as_a_row(tmp_path):
    sounds_in(tmp_path, {"custom_id": "live", "file": "live"}, {"custom_id": "no", "file": "damaged"})
    plan = plan_of(tmp_path)
    assert (plan.num_rows, plan.num_refused, plan.num_sounds, plan.num_windows) == (5, 1, 4, 1 + 2 + 4 + 1)
    assert (plan.num_unsaid, plan.sound_s) == (1, 1 + 31 + 95)
    assert plan.prompt_tokens == 4 + 2 * 20 + 4 * 4 + 4 and plan.longest_prompt == 20
    assert plan.most_output_tokens == 10 + 2 * 10 + 4 * 96 + 96
    assert plan.saved_tokens == 0  # windows begin alike, and what they hear differs
    shown = Console(file=io.StringIO(), width=120)
    shown.print(plan_table(plan, {}, [("expected time", "soon")], "sounds"))
    assert "4 of 127 s, in 8 windows" in shown.file.getvalue()
    assert "sounds of unknown length, each counted as one window" in shown.file.getvalue()


def test_the_reach_of_sounds_is_that_of_their_windows(tmp_path, monkeypatch):
    rows = sounds_in(tmp_path)
    found = reach_of(rows, token_ids, 100, foresee)
    assert found == Reach(num_rows=7, num_tokens=14 + 2 * 30 + 4 * 100, request_tokens=100)
    requests = as_logged(rows, token_ids, 100, foresee)
    assert [len(each.prompt_token_ids) for each in requests] == [4, 20, 20, 4, 4, 4, 4]
    assert len({each.cache_salt for each in requests}) == 7
    monkeypatch.setattr(reach, "MAX_HEARD", 2)
    assert reach_of(rows, token_ids, 100, foresee) is None


@pytest.mark.parametrize("named", ["live", "damaged"])
def test_a_job_with_a_sound_of_unknown_length_may_reach_anything(tmp_path, named):
    assert reach_of(sounds_in(tmp_path, {"custom_id": "x", "file": named}), token_ids, 100, foresee) is None


def test_the_report_says_how_much_of_all_runs_was_padding():
    runs = [{"computed_tokens": 30, "padded_tokens": 40}, {"computed_tokens": 10, "padded_tokens": 60}]
    assert padding_waste(*runs) == 0.6 and padding_waste() == 0.0


def machine_throughput(folder: Path, model: str = "m", **config: Any) -> MachineThroughput:
    args = argparse.Namespace(model=model, revision=None)
    return MachineThroughput(args, EngineConfig(**{"compilation_cache_dir": str(folder / "executables"), **config}))


def test_a_machine_keeps_the_pace_of_a_model_and_its_settings(tmp_path):
    own = WorkerReport(
        throughput=Throughput(0.01, 0.1, 0.03, 500), under_way=(7.0, 8.0), row_s=2.0, spent_s=9.0, price_per_hour=4.0
    )
    assert machine_throughput(tmp_path).find() is None
    machine_throughput(tmp_path).keep(own)
    found = machine_throughput(tmp_path, seed=3).find()
    assert (
        found is not None
        and found.throughput == own.throughput
        and (found.spent_s, found.under_way) == (0.0, (0.0, 0.0))
    )
    assert (
        machine_throughput(tmp_path, max_num_seqs=8).find() is None
        and machine_throughput(tmp_path, "other").find() is None
    )
    (file,) = (tmp_path / "paces").iterdir()
    file.write_text("{}")
    assert machine_throughput(tmp_path).find() is None
    machine_throughput(tmp_path, "few").keep(dataclasses.replace(own, throughput=own.throughput._replace(num_rows=9)))
    machine_throughput(tmp_path, "none").keep(dataclasses.replace(own, throughput=None))
    assert machine_throughput(tmp_path, "few").find() is None and machine_throughput(tmp_path, "none").find() is None
    nowhere = machine_throughput(tmp_path, compilation_cache_dir=None)
    nowhere.keep(own)
    assert nowhere.find() is None and len(list((tmp_path / "paces").iterdir())) == 1
