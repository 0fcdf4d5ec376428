"""Where a job reads and writes: what stands there already, links, full disks and stores that do not fit."""

import os
import re
import shutil
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_OK,
    EXIT_PREEMPTED,
    JobOptions,
    run_batch,
)
from ferrum_jax.batch.notice import Notice
from ferrum_jax.io.files.store import UrlStore
from tests.batch.fake_llm import FakeLLM
from tests.batch.job import GOOD_INPUT, Job


def test_files_that_do_not_fit_are_refused_before_the_model_loads(job, tmp_path):
    read_only = tmp_path / "folder"
    read_only.mkdir()
    for source, target, error, said in (
        (job.input, read_only, ValueError, "is not a file"),
        (job.input, read_only / "missing" / "out", ValueError, "missing, where the output belongs, is not a folder"),
        (tmp_path / "missing.jsonl", job.output, OSError, "No such file"),
        (job.input, job.input, ValueError, "input and output are both"),
    ):
        with pytest.raises(error, match=said):
            run_batch(FakeLLM, source, target, model="tiny", console=Console(quiet=True))
    with pytest.raises(ValueError, match="nowhere"):
        job.run(page_path="nowhere://bucket/report.html")
    assert not job.output.exists() and not job.llms and job.input.read_bytes() == GOOD_INPUT


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.report.json", "page.html", "out.jsonl.journal"])
def test_what_stands_where_the_job_is_to_write_is_refused_before_the_model_loads(job, tmp_path, name):
    place = tmp_path / name
    place.write_bytes(b"x") if name.endswith(".journal") else place.mkdir()
    with pytest.raises(ValueError, match=f"{re.escape(str(place))}.* is not a f"):
        job.run(page_path=str(tmp_path / "page.html"))
    assert not job.llms and {path.name for path in tmp_path.iterdir()} == {"in.jsonl", name}


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    job, place = Job(tmp_path), tmp_path / "elsewhere"
    expected = job.whole()
    place.mkdir()
    (place / "journal").mkdir()
    kept = {
        "out.jsonl": place / "mine.jsonl",
        "out.jsonl.journal": place / "journal",
        "out.jsonl.report.json": place / "r",
    }
    for name, target in kept.items():
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(target)
    assert job.run_to_step(2) == EXIT_PREEMPTED and job.run() == EXIT_OK
    assert all((tmp_path / name).is_symlink() for name in kept)
    assert (place / "mine.jsonl").read_bytes() == expected and (place / "journal" / "job.json").exists()
    assert job.run(new_run=True) == EXIT_OK
    assert (tmp_path / "old-1.out.jsonl").read_bytes() == (place / "mine.jsonl").read_bytes() == expected


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_a_link_that_leads_nowhere_is_refused_before_the_model_loads(job, tmp_path, name):
    (tmp_path / name).symlink_to(tmp_path / "gone" / "there" if name == "out.jsonl" else tmp_path / "gone")
    with pytest.raises(ValueError, match=r"gone, .*(is not a folder; make it|which is not there; make that)"):
        job.run()
    assert not job.llms and not (tmp_path / "gone").exists()


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "text", "page of another"])
def test_a_report_page_replaces_nothing_but_a_report_page(tmp_path, kind):
    job, place, other = Job(tmp_path), tmp_path / "page.html", tmp_path / "mine.txt"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind.endswith("link"):
        place.symlink_to(other)
        if kind == "link":
            other.write_text("mine")
    else:
        place.write_text("mine" if kind == "text" else "<!doctype html><title>Batch job </title>")
    before = place.lstat()
    said = "replace it; move it away" if kind in ("text", "page of another") else "is not a file; move it away"
    for path in (str(place), f"file://{place}"):
        with pytest.raises(ValueError, match=f"{re.escape(path)}.*{said}, or name another place with --report"):
            job.run(page_path=path)
    assert place.lstat() == before and not job.llms and not job.output.exists()


def test_a_report_page_replaces_an_earlier_one_and_an_empty_file(tmp_path):
    job, place = Job(tmp_path), tmp_path / "page.html"
    place.touch()
    for _ in range(2):
        assert job.run(page_path=str(place)) == EXIT_OK
        assert "Batch job" in place.read_text()
        place.write_text(place.read_text().replace("complete", "stopped"))
    assert job.run(page_path=str(place)) == EXIT_OK and "complete" in place.read_text()


def test_rows_of_a_journal_whose_record_was_deleted_are_not_those_of_another_job(job):
    notice = Notice()

    def on_step(llm: FakeLLM) -> None:
        if llm.num_steps == 3:
            shutil.rmtree(f"{job.output}.journal")
        elif llm.num_steps == 6:
            notice.give("the test", EXIT_PREEMPTED)

    assert job.run(notice=notice, on_step=on_step) == EXIT_PREEMPTED
    assert list(Path(f"{job.output}.journal/segments").iterdir())
    for new_run in (False, True):
        with pytest.raises(
            ValueError, match=r"has rows of a job and not that job's record, job\.json.* move the folder"
        ):
            job.run(seed=7, new_run=new_run)
    shutil.rmtree(f"{job.output}.journal")
    Path(f"{job.output}.report.json").unlink(missing_ok=True)
    assert job.run(seed=7) == EXIT_OK


def test_an_output_without_its_journal_is_refused_and_left_as_it_was(job):
    job.output.write_bytes(b"my thesis")
    with pytest.raises(ValueError, match=r"is there without its journal, .*out.jsonl.journal"):
        job.run()
    assert job.output.read_bytes() == b"my thesis"


def test_a_store_that_makes_a_file_twice_is_refused_before_the_model_loads(tmp_path):
    class Overwriting(MemoryFileSystem):
        cachable = False

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            super().pipe_file(path, value, **kwargs)

    job, console = Job(tmp_path), Console(quiet=True)
    target, stores = f"memory://{tmp_path}/out.jsonl", JobOptions(open_store=lambda path: UrlStore(Overwriting(), path))
    with pytest.raises(ValueError, match=r"memory://.*out.jsonl is on a store that has no conditional writes"):
        run_batch(pytest.fail, job.input, target, model="tiny", console=console, options=stores)
