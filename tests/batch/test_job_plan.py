"""The dry run counts what a job would do, writes nothing, and knows what is done."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from ferrum_jax.asked.transcription_params import TranscriptionParams
from ferrum_jax.batch import reach
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import run_batch
from ferrum_jax.batch.job_plan import expected_time, make_plan, measured_rate, plan_table
from ferrum_jax.batch.reach import as_logged, reach_of
from ferrum_jax.batch.report.recorder import padding_waste
from ferrum_jax.files.store import LocalStore
from ferrum_jax.sizes.engine_sizes import Reach
from ferrum_jax.transcribing.foreseen import ForeseenSound
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


def test_a_plan_of_a_job_that_is_done_has_nothing_left_and_knows_the_pace(folder):
    console = Console(file=io.StringIO())
    run_batch(FakeLLM, folder / "in.jsonl", folder / "out.jsonl", model="m", console=console)
    plan = plan_of(folder)
    assert plan.num_done == 15 and plan.prompt_tokens == plan.most_output_tokens == 0
    assert measured_rate(LocalStore(folder), "out.jsonl") > 0
    assert measured_rate(LocalStore(folder), "other.jsonl") is None
    for content in ("", "[]", "{}"):
        (folder / "damaged.jsonl.report.json").write_text(content)
        assert measured_rate(LocalStore(folder), "damaged.jsonl") is None


def test_the_table_says_all_of_it(folder):
    shown = Console(file=io.StringIO(), width=120)
    plan = plan_of(folder)
    shown.print(plan_table(plan, {"KV pool": "1 MiB"}, expected_time(plan, 100.0, 1.0), "in.jsonl"))
    text = shown.file.getvalue()
    for part in ("576 (74.8%)", "1 of 10 rows", "at most 4.7 s, at the pace of earlier runs", "1 MiB", "line 16"):
        assert part in text


def test_the_table_shows_text_of_users_as_it_is(tmp_path):
    odd = "[/INST] [red]x[/red] :warning:"
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "prompt": "x", odd: 1}) + "\n")
    shown = Console(file=io.StringIO(), width=400)
    shown.print(plan_table(plan_of(tmp_path), {"executables": odd}, odd, odd))
    assert shown.file.getvalue().count(odd) == 4


def test_without_an_earlier_run_the_time_is_bounded_by_the_device(folder):
    assert expected_time(plan_of(folder), None, 222.0).startswith("more than 222.0 s, by the device's own limits")


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
    monkeypatch.setattr(reach, "MOST_MEASURED", 14)
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
    shown.print(plan_table(plan, {}, "soon", "sounds"))
    assert "4 of 127 s, in 8 windows" in shown.file.getvalue()
    assert "sounds of unknown length, each counted as one window" in shown.file.getvalue()


def test_the_reach_of_sounds_is_that_of_their_windows(tmp_path, monkeypatch):
    rows = sounds_in(tmp_path)
    found = reach_of(rows, token_ids, 100, foresee)
    assert found == Reach(num_rows=7, num_tokens=14 + 2 * 30 + 4 * 100, request_tokens=100)
    requests = as_logged(rows, token_ids, 100, foresee)
    assert [len(each.prompt_token_ids) for each in requests] == [4, 20, 20, 4, 4, 4, 4]
    assert len({each.cache_salt for each in requests}) == 7
    monkeypatch.setattr(reach, "MOST_HEARD", 2)
    assert reach_of(rows, token_ids, 100, foresee) is None


@pytest.mark.parametrize("named", ["live", "damaged"])
def test_a_job_with_a_sound_of_unknown_length_may_reach_anything(tmp_path, named):
    assert reach_of(sounds_in(tmp_path, {"custom_id": "x", "file": named}), token_ids, 100, foresee) is None


def test_the_report_says_how_much_of_all_runs_was_padding():
    runs = [{"computed_tokens": 30, "padded_tokens": 40}, {"computed_tokens": 10, "padded_tokens": 60}]
    assert padding_waste(*runs) == 0.6 and padding_waste() == 0.0
