"""The clerk of a server's batches: kills in every state, expiry, cancelling, and one clerk at a time."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ferrum_jax.files.store import LocalStore
from ferrum_jax.serve.batches.batch_folder import BatchFolder, FolderFull
from ferrum_jax.serve.batches.clerk import Clerk, ClerkTimes
from ferrum_jax.serve.batches.pauses import Pauses
from tests.batch.fake_llm import FakeLLM
from tests.serve.batch_input import CHAT, rows
from tests.serve.clerk_program import PLACES, rules_of, work
from tests.support import ROOT

NOW, WINDOW_S = 1_800_000_000, 3600
INPUT = rows(12, max_tokens=6) + rows(2, temperature=-1.0, first=12) + rows(12, max_tokens=9, first=14)


@pytest.fixture
def folder(tmp_path):
    return BatchFolder(str(tmp_path / "batches"), most_stored_bytes=1 << 20)


def asked_of(folder: BatchFolder, content: bytes = INPUT, created: int = NOW):
    file = folder.add_file(
        io.BytesIO(content), len(content), owner="", filename="rows.jsonl", purpose="batch", created=NOW
    )
    asked = {"owner": "", "input_file": file.id, "endpoint": CHAT, "window": "1h"}
    return folder.add_batch(**asked, created=created, expires=NOW + WINDOW_S)


def lines(folder: BatchFolder, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(line) for line in folder.read(file_id, 0, folder.file(file_id).num_bytes).splitlines()]


def ids(found: list[dict]) -> list[int]:
    return [int(line["custom_id"].removeprefix("row-")) for line in found]


def run(folder: BatchFolder, place: str, now: float) -> int:
    words = [sys.executable, "-m", "tests.serve.clerk_program", folder.root, place, str(now)]
    return subprocess.run(words, cwd=ROOT, timeout=120, check=False).returncode


def whole(folder: BatchFolder) -> tuple[list[dict], list[dict]]:
    """Output and errors of a batch that is never killed."""
    asked = asked_of(folder)
    work(folder.root, "none", NOW + 1)
    state = folder.state(asked.id)
    assert state.status == "completed"
    return lines(folder, state.output_file), lines(folder, state.error_file)


@pytest.mark.parametrize("place", PLACES)
def test_a_batch_that_is_killed_in_any_state_has_each_row_once(folder, tmp_path, place):
    asked = asked_of(folder)
    assert run(folder, place, NOW + 1) == -signal.SIGKILL
    assert folder.state(asked.id).is_final == (place == "final")
    work(folder.root, "none", NOW + 2)
    state = folder.state(asked.id)
    assert state.status == "completed" and (state.num_rows, state.num_ok, state.num_failed) == (26, 24, 2)
    wanted = whole(BatchFolder(str(tmp_path / "other"), most_stored_bytes=1 << 20))
    assert (lines(folder, state.output_file), lines(folder, state.error_file)) == wanted
    assert ids(wanted[0]) == [*range(12), *range(14, 26)] and ids(wanted[1]) == [12, 13]
    assert folder.store.names("jobs") == ["README"], "what the job kept is deleted"
    assert len(folder.files()) == 3


@pytest.mark.parametrize("place", ["rows", "first file", "files", "end", "final"])
@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_batch_that_ends_early_is_killed_and_ends_the_same(folder, how, place):
    asked = asked_of(folder)
    assert run(folder, "rows", NOW + 1) == -signal.SIGKILL
    if how == "cancelled":
        folder.cancel(asked.id, NOW + 5)
    later = NOW + 10 if how == "cancelled" else NOW + WINDOW_S
    if place != "rows":
        assert run(folder, place, later) == -signal.SIGKILL
    work(folder.root, "none", later)
    state = folder.state(asked.id)
    assert state.status == how
    done, failed = ids(lines(folder, state.output_file)), lines(folder, state.error_file)
    assert 0 < len(done) < 24 and {*done} <= {*range(12), *range(14, 26)}, "some rows were answered"
    codes = [line["error"]["code"] for line in failed]
    assert codes.count("invalid_request") == 2 and state.num_failed == len(failed)
    if how == "expired":
        assert sorted([*done, *ids(failed)]) == [*range(26)], "each row is in one of the files"
        assert codes.count("batch_expired") == 24 - len(done)
    else:
        assert len(failed) == 2


def test_batches_that_wait_are_cancelled_and_expire_too(folder):
    first, waits, late = (asked_of(folder, created=NOW + i) for i in range(3))
    folder.cancel(waits.id, NOW)
    steps = threading.Event()
    times = ClerkTimes(poll_s=0.01, flush_s=0.01, now=lambda: NOW + WINDOW_S - 1 + 2 * steps.is_set())

    def hold(llm: FakeLLM) -> None:
        until = time.monotonic() + 30
        while folder.state(late.id).status != "expired" and time.monotonic() < until:
            if folder.state(waits.id).status == "cancelled":
                steps.set()  # time goes on
            time.sleep(0.01)

    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=hold), rules_of, times)
    thread = threading.Thread(target=clerk.run)
    thread.start()
    until = time.monotonic() + 60
    while not all(folder.state(each.id).is_final for each in (first, waits, late)) and time.monotonic() < until:
        time.sleep(0.02)
    clerk.end()
    thread.join()
    assert [folder.state(each.id).status for each in (first, waits, late)] == ["expired", "cancelled", "expired"]
    assert folder.state(waits.id).output_file is None


def run_until_final(folder: BatchFolder, asked, now: float = NOW + 2, names=("other", "small")) -> None:
    """By a clerk whose server serves these names."""
    others = lambda endpoint: rules_of(endpoint)._replace(names=names)  # noqa: E731
    times = ClerkTimes(poll_s=0.01, pause_s=0.01, now=lambda: now)
    clerk = Clerk(folder, lambda owner: FakeLLM(), others, times)
    thread = threading.Thread(target=clerk.run)
    thread.start()
    until = time.monotonic() + 60
    while not folder.state(asked.id).is_final and time.monotonic() < until:
        time.sleep(0.01)
    clerk.end()
    thread.join()


@pytest.mark.parametrize("names", [("other", "small"), ("other",)])
def test_a_batch_of_another_model_fails_with_the_rows_that_were_answered(folder, names):
    asked = asked_of(folder)
    assert run(folder, "rows", NOW + 1) == -signal.SIGKILL
    run_until_final(folder, asked, names=names)
    state = folder.state(asked.id)
    (error,) = state.errors
    assert state.status == "failed" and error["code"] == "job_refused"
    assert error["message"] == (
        'the server now serves other settings than those with which this batch began: model "small", now "other"'
    )
    done = ids(lines(folder, state.output_file))
    assert 0 < len(done) == state.num_ok < 24 and ids(lines(folder, state.error_file)) == [12, 13]
    assert folder.store.names("jobs") == ["README"], "all that was answered is in the files"


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_batch_ends_early_under_another_name_with_the_rows_that_were_answered(folder, how):
    asked = asked_of(folder)
    assert run(folder, "rows", NOW + 1) == -signal.SIGKILL
    if how == "cancelled":
        folder.cancel(asked.id, NOW + 5)
    run_until_final(folder, asked, NOW + 10 if how == "cancelled" else NOW + WINDOW_S, names=("other",))
    state = folder.state(asked.id)
    assert state.status == how and 0 < len(lines(folder, state.output_file)) == state.num_ok


def test_a_batch_that_waits_is_checked_again_under_other_names(folder):
    asked = asked_of(folder)
    assert run(folder, "in_progress", NOW + 1) == -signal.SIGKILL
    run_until_final(folder, asked, names=("other",))
    state = folder.state(asked.id)
    assert state.status == "failed" and {error["code"] for error in state.errors} == {"model_not_found"}


def test_answers_that_cannot_be_read_are_kept(folder):
    asked = asked_of(folder)
    assert run(folder, "rows", NOW + 1) == -signal.SIGKILL
    job = folder.job_path(asked.id)
    segments = sorted(Path(f"{job}.journal/segments").iterdir())
    folder.remove_file(asked.input_file)
    run_until_final(folder, asked, names=("small",))
    state = folder.state(asked.id)
    assert state.status == "failed" and {error["code"] for error in state.errors} == {"server_error"}
    assert folder.root not in str(state.errors)
    run_until_final(folder, asked_of(folder, rows(1)), names=("small",))  # a server that is begun anew
    assert sorted(Path(f"{job}.journal/segments").iterdir()) == segments != []


class Disk:
    """Full or not: writes to local folders raise while it is."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full, self.num_refused = False, 0
        for name in ("create", "replace", "writing"):
            patch.setattr(LocalStore, name, self._writing(getattr(LocalStore, name)))

    def _writing(self, write):
        def writes(*args, **more):
            if self.is_full:
                self.num_refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[1]))
            return write(*args, **more)

        return writes


@pytest.mark.parametrize("how", ["completed", "expired"])
def test_a_full_disk_is_waited_for_and_logged_once(folder, monkeypatch, caplog, how):
    asked, disk, now = asked_of(folder), Disk(monkeypatch), NOW + 1

    def step(llm: FakeLLM) -> None:
        time.sleep(0.002)
        if llm.num_steps == 12 and not disk.num_refused:
            disk.is_full = True

    def wait(what) -> None:
        until = time.monotonic() + 60
        while not what() and time.monotonic() < until:
            time.sleep(0.005)

    times = ClerkTimes(poll_s=0.005, flush_s=0.01, expiry_s=0.5, pause_s=0.01, now=lambda: now)
    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=step), rules_of, times)
    thread = threading.Thread(target=clerk.run)
    thread.start()
    wait(lambda: disk.num_refused > 20)
    assert folder.state(asked.id).status == "in_progress"
    now = now if how == "completed" else NOW + WINDOW_S
    wait(lambda: disk.num_refused > 40)
    assert folder.state(asked.id).status == "in_progress"
    (line,) = [record for record in caplog.records if record.name == "ferrum_jax.serve"]
    assert "No space left" in line.getMessage() and line.exc_info is None
    disk.is_full = False
    wait(lambda: folder.state(asked.id).is_final)
    clerk.end()
    thread.join()
    state = folder.state(asked.id)
    assert state.status == how and not state.errors
    done = ids(lines(folder, state.output_file))
    assert len(done) == 24 if how == "completed" else 0 < len(done) < 24
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records][-1] == "it works again"


def test_a_clerk_begins_once_a_full_disk_has_room(folder, monkeypatch, caplog):
    asked, disk = asked_of(folder), Disk(monkeypatch)
    disk.is_full = True
    clerk = Clerk(folder, lambda owner: FakeLLM(), rules_of, ClerkTimes(poll_s=0.01, now=lambda: NOW + 1))
    thread = threading.Thread(target=clerk.run)
    thread.start()
    until = time.monotonic() + 60
    while disk.num_refused < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(caplog.records) == 1
    disk.is_full = False
    while not folder.state(asked.id).is_final and time.monotonic() < until:
        time.sleep(0.01)
    clerk.end()
    thread.join()
    assert folder.state(asked.id).status == "completed"


@pytest.mark.parametrize(("first_s", "pauses"), [(1.0, [1, 2, 4, 5, 5]), (9.0, [5, 5])])
def test_pauses_grow_until_it_works(monkeypatch, first_s, pauses):
    now = 100.0
    monkeypatch.setattr("ferrum_jax.serve.batches.pauses.time.monotonic", lambda: now)
    found = Pauses("it", first_s=first_s, most_s=5.0)
    for _ in range(2):
        for pause in pauses:
            found.begin(OSError("away"))
            now += pause - 0.1
            assert not found.is_over
            now += 0.2
            assert found.is_over
        found.end()


def test_one_clerk_at_a_time_works_at_a_folder(folder):
    asked = asked_of(folder)
    goes_on, seen = threading.Event(), []

    def hold(llm: FakeLLM) -> None:
        seen.append(llm)
        goes_on.wait(30)

    times = ClerkTimes(poll_s=0.01, flush_s=0.01, now=lambda: NOW + 1)
    clerks = [Clerk(folder, lambda owner: FakeLLM(on_step=hold), rules_of, times) for _ in range(2)]
    threads = [threading.Thread(target=clerk.run) for clerk in clerks]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while not seen and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.3)
    assert len(seen) == 1, "the other one waits"
    goes_on.set()
    while not folder.state(asked.id).is_final and time.monotonic() < until:
        time.sleep(0.01)
    for clerk, thread in zip(clerks, threads, strict=True):
        clerk.end()
        thread.join()
    assert folder.state(asked.id).status == "completed"


def test_a_full_folder_takes_no_more(folder):
    with pytest.raises(FolderFull, match="2,000,000 bytes, and 0 of at most 1,048,576 are kept already"):
        folder.add_file(io.BytesIO(), 2_000_000, owner="", filename="a", purpose="batch", created=NOW)


def test_a_folder_may_be_a_bucket():
    folder = BatchFolder("memory://batches", most_stored_bytes=1 << 20)
    output, errors = whole(folder)
    assert len(output) == 24 and len(errors) == 2
    folder.remove_file(folder.files()[0].id)
    assert len(folder.files()) == 2
