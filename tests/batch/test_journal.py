"""The output file is the job's memory: whole lines count, a torn tail is dropped, strange files are left alone."""

import json
import os

import pytest

from ferrum_jax.batch.formats import BadRow, Row, parse_line
from ferrum_jax.batch.journal import Journal
from ferrum_jax.batch.responses import JobIdentity, completed_line, failed_line
from tests.batch.fake_llm import answer


def done_line(custom_id: str, *, fingerprint: str = "fp_0") -> bytes:
    row = parse_line(json.dumps({"custom_id": custom_id, "prompt": "x", "max_tokens": 2}).encode(), 1)
    assert isinstance(row, Row)
    job = JobIdentity(model="tiny", created=123, fingerprint=fingerprint)
    return completed_line(row, answer(row.prompt, row.params), job)


BAD_LINE = failed_line(BadRow(id="f" * 32, custom_id="bad", code="invalid_request", message="no"))


def test_a_new_journal_is_empty_and_keeps_what_is_appended(tmp_path):
    journal = Journal(tmp_path / "out.jsonl")
    assert journal.finished.ids == set() and journal.finished.created is None
    journal.append(done_line("a"))
    assert (tmp_path / "out.jsonl").read_bytes() == done_line("a")  # before close: a kill loses nothing
    journal.append(BAD_LINE)
    journal.close()
    journal.close()
    assert (tmp_path / "out.jsonl").read_bytes() == done_line("a") + BAD_LINE


def test_an_opened_journal_knows_its_lines(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(done_line("a") + BAD_LINE)
    journal = Journal(path)
    journal.close()
    finished = journal.finished
    assert set(finished.id_of) == {"a", "bad"} and len(finished.ids) == 2
    assert (finished.num_failed, finished.created, finished.fingerprint) == (1, 123, "fp_0")


def test_a_tail_torn_at_any_byte_is_cut_off_and_the_whole_lines_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "out.jsonl"
    first, second = done_line("a"), done_line("b")
    for end in range(len(second)):
        path.write_bytes(first + second[:end])
        journal = Journal(path)
        journal.append(BAD_LINE)
        journal.close()
        assert path.read_bytes() == first + BAD_LINE
        assert set(journal.finished.id_of) == {"a"}


@pytest.mark.parametrize(
    "content",
    [b"my thesis", b"my thesis\n", b"{}\n", b'{"id": "batch_x", "custom_id": 1}\n', b"[]\n", b"\n", b"\xff\n", b"3\n"],
)
def test_a_file_that_no_job_wrote_is_refused_and_left_as_it_was(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"line 1 of .*out.jsonl is not a line of a batch job's output"):
        Journal(path)
    assert path.read_bytes() == content


def test_a_line_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(done_line("a") * 2)
    with pytest.raises(ValueError, match=r"line 2 of .* is there twice"):
        Journal(path)


def test_lines_of_jobs_with_other_settings_in_one_file_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(done_line("a") + done_line("b", fingerprint="fp_1"))
    with pytest.raises(ValueError, match=r"line 2 of .* was written by a job with other settings"):
        Journal(path)


def test_a_second_journal_on_the_same_file_is_refused_until_the_first_is_closed(tmp_path):
    first = Journal(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="being written by another job"):
        Journal(tmp_path / "out.jsonl")
    first.close()
    Journal(tmp_path / "out.jsonl").close()


def test_a_folder_or_a_device_is_refused_as_output(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        Journal(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        Journal(tmp_path / "missing" / "out.jsonl")
