"""Rows take the answers of earlier jobs that ask the same of the same model, and only these."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from ferrum_jax.batch.job import EXIT_ROWS_FAILED
from ferrum_jax.batch.journal.job_record import record_of
from tests.batch.fake_llm import IDENTITY, FakeLLM, json_lines
from tests.batch.job import ROWS, Job, shown_words
from tests.batch.verify.planted import Written, verified

CALM = {"custom_id": "calm", "prompt": "2 + 2 =", "max_tokens": 5, "temperature": 0}
READ = [{"custom_id": "v", "input": ["a text", "and"]}, {"custom_id": "s", "text_1": "x", "text_2": ["y", "z"]}]
OLD = [*ROWS, CALM, *READ]
NEW = [*OLD[:2], {"custom_id": "between", "prompt": "new"}, {**OLD[2], "max_tokens": 3}, *OLD[3:]]
ELSEWHERE = dataclasses.replace(IDENTITY, environment={"mesh": "tp=2", "jaxlib": "1"})
FAST = dataclasses.replace(IDENTITY, invariant=False)


def job_in(folder: Path, rows: list[dict], start: int = 5_000) -> Job:
    folder.mkdir(exist_ok=True)
    job = Job(folder, json_lines(rows))
    job.clock = itertools.count(start)
    return job


@pytest.fixture
def old(tmp_path) -> Job:
    job = job_in(tmp_path / "old", OLD, 1_000)
    assert job.run() == 0
    return job


def fresh(tmp_path: Path, rows: list[dict], **how) -> bytes:
    job = job_in(tmp_path / "fresh", rows)
    job.run(**how)
    return job.output.read_bytes()


def num_asked(job: Job) -> int:
    """Prompts that engines got."""
    return sum(llm.num_pulled for llm in job.llms)


def edited(job: Job, old: str, new: str, end: str = "") -> None:
    path = Path(f"{job.output}{end}")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def test_only_changed_rows_run_and_the_output_has_the_bytes_of_a_fresh_one(tmp_path, old):
    job = job_in(tmp_path / "new", NEW)
    assert job.run(reuse=[str(old.output)]) == 0
    assert num_asked(job) == 2
    assert job.output.read_bytes() == fresh(tmp_path, NEW)
    reused, outputs = job.report()["reused"].values()
    assert reused == len(NEW) - 2 == len(OLD) - 1
    assert outputs == [{"path": str(old.output), "digest": record_of(str(old.output), None).output}]
    assert "rows with an earlier job's answer" in shown_words(job)
    found = verified(tmp_path / "new", FakeLLM)
    assert found.is_right and found.num_answered == len(NEW) and found.promise is not None and found.promise.bits


@pytest.mark.parametrize(("step", "goes_on_with"), [(1, True), (3, True), (3, False)])
def test_a_job_that_is_stopped_goes_on_with_what_it_had_taken(tmp_path, old, step, goes_on_with):
    rows = [*OLD[:3], *({"custom_id": str(n), "prompt": f"{n}"} for n in range(8)), *OLD[3:]]
    job, reuse = job_in(tmp_path / "new", rows), [str(old.output)]
    assert job.run_to_step(step, reuse=reuse, flush_s=0.01) != 0
    assert job.run(reuse=reuse if goes_on_with else []) == 0
    assert (job.report()["reused"]["rows"] == len(OLD)) == goes_on_with
    assert job.output.read_bytes() == fresh(tmp_path, rows)


def test_a_row_of_another_name_takes_an_answer_that_no_seed_decides(tmp_path, old):
    rows = [{**row, "custom_id": f"my {row['custom_id']}"} for row in OLD]
    job = job_in(tmp_path / "new", [*rows, {**CALM, "custom_id": "twin", "user": "me", "priority": 3}])
    assert job.run(reuse=[str(old.output)]) == 0
    assert num_asked(job) == len(ROWS), "their seeds follow from their names"
    assert job.report()["reused"]["rows"] == 2 + len(READ)
    assert job.output.read_bytes() == fresh(
        tmp_path, [*rows, {**CALM, "custom_id": "twin", "user": "me", "priority": 3}]
    )


def test_another_seed_and_another_prompt_are_computed(tmp_path, old):
    rows = [*ROWS, {**CALM, "prompt": "2 + 3 ="}, {**CALM, "custom_id": "longer", "max_tokens": 6}]
    job = job_in(tmp_path / "new", rows)
    assert job.run(reuse=[str(old.output)], seed=1) == 0
    assert num_asked(job) == len(rows) and job.report()["reused"]["rows"] == 0
    assert job.output.read_bytes() == fresh(tmp_path, rows, seed=1)


class Renders(FakeLLM):
    """A model whose template writes the day into prompts."""

    def row_tasks(self, now):
        make = super().row_tasks(now)
        return lambda request: make(request._replace(content=f"{now:%j} {request.content}"))


def test_a_prompt_that_is_rendered_otherwise_is_computed(tmp_path):
    first, same, later = (job_in(tmp_path / str(day), [CALM], day) for day in (0, 60, 100_000))
    first.run(llm=Renders)
    for job, count in ((same, 0), (later, 1)):
        assert job.run(llm=Renders, reuse=[str(first.output)]) == 0 and num_asked(job) == count


def test_failed_rows_run_again(tmp_path):
    rows = [{"custom_id": "long", "prompt": "x" * 40}, CALM]
    first, job = job_in(tmp_path / "old", rows), job_in(tmp_path / "new", rows)
    assert first.run(limit=20) == EXIT_ROWS_FAILED
    assert job.run(reuse=[str(first.output)]) == 0 and num_asked(job) == 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda job: edited(job, '"text": "', '"text": "not '), "is not what"),
        (lambda job: edited(job, '"custom_id": "calm"', '"custom_id": "a"'), "is not what"),
        (lambda job: job.output.write_bytes(job.output.read_bytes().rpartition(b'{"id"')[0]), "is not what"),
        (lambda job: job.output.write_bytes(job.output.read_bytes()[:-400]), "edited or cut off"),
        (lambda job: edited(job, '{"id": "batch_req_', "hello"), "edited or cut off"),
        (lambda job: edited(job, '"created": 1', '"created": 2', ".report.json"), "is not as it was written"),
        (lambda job: Path(f"{job.output}.report.json").unlink(), "is not there"),
        (lambda job: job.output.write_bytes(b""), "is not what"),
    ],
)
def test_an_output_that_was_edited_is_refused_before_a_model_loads(tmp_path, old, spoil, why):
    spoil(old)
    job = job_in(tmp_path / "new", NEW)
    with pytest.raises(ValueError, match=why):
        job.run(reuse=[str(old.output)])
    assert not job.llms and not job.output.exists()


@pytest.mark.parametrize(
    ("identity", "how", "why"),
    [
        (dataclasses.replace(IDENTITY, weights="01"), {"reuse_text": True}, "another model answered.*weights"),
        (dataclasses.replace(IDENTITY, chat_template="t"), {"reuse_text": True}, "another model answered.*template"),
        (dataclasses.replace(IDENTITY, generation={"top_k": 3}), {}, "another model answered.*generation"),
        (IDENTITY, {"require_valid": True}, "was not run with --require-valid"),
        (ELSEWHERE, {}, "the environment is another: mesh.*add --reuse-text"),
        (FAST, {}, "the mode is another: invariant.*add --reuse-text"),
        (ELSEWHERE, {"reuse_text": True, "strict_bits": True}, "may have other bits"),
    ],
)
def test_answers_of_another_model_or_elsewhere_are_refused(tmp_path, old, identity, how, why):
    job = job_in(tmp_path / "new", NEW)
    with pytest.raises(ValueError, match=why):
        job.run(reuse=[str(old.output)], identity=identity, **how)
        job.run(reuse=[str(old.output)], identity=identity, **how)
    assert not job.output.exists()


@pytest.mark.parametrize("identity", [ELSEWHERE, FAST])
def test_texts_from_elsewhere_are_taken_if_asked_for_and_promise_no_bits(tmp_path, old, identity):
    job = job_in(tmp_path / "new", NEW)
    assert job.run(reuse=[str(old.output)], reuse_text=True, identity=identity) == 0
    assert num_asked(job) == 2
    found = verified(tmp_path / "new", lambda: FakeLLM(identity=identity))
    assert found.is_right and found.promise is not None and not found.promise.bits
    assert len(job.report()["environments"]) == 2


def test_where_two_outputs_disagree_the_row_is_computed(tmp_path, old):
    class Other(FakeLLM):
        """Answers as another engine would that claims to be the same."""

        def row_tasks(self, now):
            make = super().row_tasks(now)
            return lambda request: make(request._replace(params=dataclasses.replace(request.params, max_tokens=2)))

    other = job_in(tmp_path / "other", [CALM, *READ])
    other.run(llm=Other)
    job = job_in(tmp_path / "new", OLD)
    assert job.run(reuse=[str(old.output), str(other.output)]) == 0
    assert num_asked(job) == 1 and job.report()["reused"]["rows"] == len(OLD) - 1
    assert job.output.read_bytes() == fresh(tmp_path, OLD)


def test_an_output_of_an_older_version_is_refused_by_name(tmp_path, old, monkeypatch):
    monkeypatch.setattr("ferrum_jax.batch.journal.responses._requested", lambda row, outputs: {})
    older = job_in(tmp_path / "older", OLD)
    older.run()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="older version"):
        job_in(tmp_path / "new", NEW).run(reuse=[str(old.output), str(older.output)])
    assert verified(tmp_path / "older", FakeLLM).is_right, "what it never said is not missed"


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl.gz"])
def test_outputs_of_every_form_are_taken(tmp_path, name):
    first, job = job_in(tmp_path / "old", OLD), job_in(tmp_path / "new", NEW)
    first.output = first.output.with_name(name)
    first.run()
    assert job.run(reuse=[str(first.output)]) == 0 and num_asked(job) == 2
    assert job.output.read_bytes() == fresh(tmp_path, NEW)


def test_a_forged_answer_is_found_by_answering_again(tmp_path, old):
    """Who edits an output can make all digests anew, so it is the model that has the last word."""
    written = Written.read(tmp_path / "old")
    written.choice("calm")["text"] = "forged"
    written.forge()
    written.write(tmp_path / "old")
    assert job_in(tmp_path / "new", NEW).run(reuse=[str(old.output)]) == 0
    found = verified(tmp_path / "new", FakeLLM)
    assert [row.custom_id for row in found.differing] == ["calm"] and not found.is_right
