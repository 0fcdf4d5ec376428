"""What a job may be started again with: its rows, its settings, its names; and what is done already stays."""

import pytest

from ferrum_jax.batch.job import (
    EXIT_OK,
    EXIT_PREEMPTED,
)
from ferrum_jax.batch.journal.journal_file import object_in
from tests.batch.fake_llm import json_lines
from tests.batch.job import ASKING, GOOD_INPUT, ROWS, Job, at_step


def test_a_job_goes_on_only_with_the_adapters_that_it_was_begun_with(tmp_path):
    rows = [
        {"custom_id": str(i), "prompt": "x", "max_tokens": 2, "model": "poet" if i % 2 else "tiny"} for i in range(9)
    ]
    job = Job(tmp_path, json_lines(rows))
    expected = job.whole(adapters=["poet"])
    assert job.run_to_step(2, adapters=["poet"]) == EXIT_PREEMPTED
    for others in ([], ["poet", "clerk"]):
        with pytest.raises(ValueError, match=r"begun with other settings: adapters \[\"poet\"\], now"):
            job.run(adapters=others)
    assert job.run(adapters=["poet"]) == EXIT_OK
    assert job.output.read_bytes() == expected
    with pytest.raises(ValueError, match="both called 'tiny'"):
        job.run(adapters=["tiny"])


def test_a_job_that_goes_on_knows_the_names_that_it_was_begun_with_and_learns_others(tmp_path):
    job = Job(tmp_path, json_lines(ASKING))
    assert job.run_to_step(3, names=["gpt"]) == EXIT_PREEMPTED
    assert job.run(names=["gpt2", "Org/Tiny"]) == EXIT_OK
    assert all(line["error"] is None for line in job.lines())


def test_a_finished_job_started_again_changes_nothing_and_loads_no_model(job):
    job.run()
    before = job.output.read_bytes()
    for lost in (False, True):
        if lost:
            job.output.unlink()  # it is merged again
        assert job.run() == EXIT_OK
        assert job.output.read_bytes() == before and len(job.llms) == 1


def test_a_changed_row_is_refused_before_the_model_loads_and_nothing_is_written(job):
    job.run()
    before = job.output.read_bytes()
    job.input.write_bytes(GOOD_INPUT.replace(b"def f", b"def h"))
    with pytest.raises(ValueError, match=r"whose content was another: 'a' \(1 in all\).*give changed rows another"):
        job.run()
    assert job.output.read_bytes() == before and len(job.llms) == 1


def test_rows_may_be_added_but_not_taken_away(job):
    job.run()
    job.input.write_bytes(b'{"custom_id": "f", "prompt": "new"}\n' + GOOD_INPUT)
    assert job.run() == EXIT_OK
    assert len(job.lines()) == 6 and job.llms[-1].num_pulled == 1
    job.input.write_bytes(GOOD_INPUT)
    with pytest.raises(ValueError, match=r"rows that are not in the input.*'f'"):
        job.run()


def test_while_a_worker_runs_another_input_is_refused_before_its_model_loads(tmp_path):
    job, more, other = Job(tmp_path), Job(tmp_path), Job(tmp_path)
    more.input, other.input = tmp_path / "more.jsonl", tmp_path / "other.jsonl"
    more.input.write_bytes(GOOD_INPUT + json_lines([{"custom_id": "added", "prompt": "x"}]))
    other.input.write_bytes(json_lines([{"custom_id": "x", "prompt": "x"}]))

    def begin_others() -> None:
        for late in (more, other):
            with pytest.raises(ValueError, match=r"worker \w+ is at work on this job with another input"):
                late.run()

    assert job.run(on_step=at_step(1, begin_others)) == 0 and not more.llms and not other.llms
    assert len(job.lines()) == len(ROWS)
    assert more.run() == 0 and len(more.lines()) == len(ROWS) + 1, "rows may be added when nobody runs the old ones"


@pytest.mark.parametrize("other", [{"model": "big"}, {"seed": 1}, {"others": {"dtype": "bfloat16"}}])
def test_a_job_does_not_go_on_with_other_settings(job, other):
    job.run_to_step(2)
    with pytest.raises(ValueError, match="was begun with other settings"):
        job.run(**other)


def test_a_jobs_defaults_are_those_of_its_rows_and_a_setting(job, tmp_path):
    plain = job.whole()
    job.run_to_step(2, defaults={"max_tokens": 3, "n": 2})
    record = object_in((tmp_path / "out.jsonl.journal" / "job.json").read_bytes())
    assert record["settings"]["defaults"] == {"max_tokens": 3, "n": 2}
    for other in ({}, {"defaults": {"max_tokens": 3}}):
        with pytest.raises(ValueError, match="was begun with other settings"):
            job.run(**other)
    assert job.run(defaults={"max_tokens": 3, "n": 2}) == EXIT_OK
    lengths = {name: line["response"]["body"]["usage"]["completion_tokens"] for name, line in job.by_id().items()}
    assert lengths["c"] == 3 + 2 and lengths["d"] == 2 + 1 and lengths["a"] == 4 + 3  # its own where it has one
    assert job.output.read_bytes() != plain


def test_a_job_goes_on_with_other_defaults_of_what_changes_no_answer(job, tmp_path):
    whole = job.whole()
    record = tmp_path / "out.jsonl.journal" / "job.json"
    for defaults in ({"speculative": False}, {}, {"speculative": True}):
        assert job.run_to_step(1, defaults=defaults) == EXIT_PREEMPTED
        assert "defaults" not in object_in(record.read_bytes())["settings"]
    undrafted = [
        row | {"body": row["body"] | {"speculative": False}} if "body" in row else row | {"speculative": False}
        for row in ROWS
    ]
    job.input.write_bytes(json_lines(undrafted))  # rows too may change it
    assert job.run() == EXIT_OK and job.output.read_bytes() == whole
