"""The clerk of a server's batches: kills in every state, expiry, cancelling, and one clerk at a time."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import io
import json
import os
import threading
import time
from pathlib import Path

import pytest

from ferrum_jax.io.files.store import LocalStore
from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.serve.batches.batch_folder import BatchFolder, FolderFull
from ferrum_jax.serve.batches.clerk import Clerk, ClerkTimes
from ferrum_jax.serve.batches.input_lines import InputRules
from ferrum_jax.serve.batches.pauses import Pauses
from tests.batch.fake_llm import IDENTITY, FakeLLM
from tests.serve.batch_input import CHAT, rows
from tests.serve.test_under_load import until
from tests.support import raising

NOW, WINDOW_S = 1_800_000_000, 3600
INPUT = rows(12, max_tokens=6) + rows(2, temperature=-1.0, first=12) + rows(12, max_tokens=9, first=14)


@pytest.fixture
def folder(tmp_path):
    return BatchFolder(str(tmp_path / "batches"), most_stored_bytes=1 << 20)


def asked_of(folder: BatchFolder, content: bytes = INPUT, created: int = NOW, owner: str = ""):
    file = folder.add_file(
        io.BytesIO(content), len(content), owner=owner, filename="rows.jsonl", purpose="batch", created=NOW
    )
    asked = {"owner": owner, "input_file": file.id, "endpoint": CHAT, "window": "1h"}
    return folder.add_batch(**asked, created=created, expires=NOW + WINDOW_S)


def lines(folder: BatchFolder, file_id: str | None) -> list[dict]:
    if file_id is None:
        return []
    return [json.loads(line) for line in folder.read(file_id, 0, folder.file(file_id).num_bytes).splitlines()]


def ids(found: list[dict]) -> list[int]:
    return [int(line["custom_id"].removeprefix("row-")) for line in found]


def rules_of(endpoint: str) -> InputRules:
    names, most = ("small",), {"max_rows": 1000, "max_line_bytes": 1 << 20, "limits": BodyLimits()}
    return InputRules(endpoint=endpoint, names=names, listed=names, **most)


def begun(folder: BatchFolder) -> None:
    """By a clerk that ends once some rows are answered."""

    def step(llm: FakeLLM) -> None:
        time.sleep(0.005)
        if llm.num_steps >= 12 and any(Path(folder.root, "jobs").rglob("segments/[!.]*")):
            clerk.end()

    times = ClerkTimes(poll_s=0.02, flush_s=0.02, now=lambda: NOW + 1)
    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=step), rules_of, times)
    clerk.run()


@contextlib.contextmanager
def working(*clerks: Clerk):
    """The clerks work meanwhile."""
    threads = [threading.Thread(target=clerk.run) for clerk in clerks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for clerk, thread in zip(clerks, threads, strict=True):
            clerk.end()
            thread.join()


def all_final(folder: BatchFolder, *asked) -> bool:
    return all(folder.state(each.id).is_final for each in asked)


def test_batches_that_wait_are_cancelled_and_expire_too(folder):
    first, waits, late = (asked_of(folder, created=NOW + i) for i in range(3))
    folder.cancel(waits.id, NOW)
    steps = threading.Event()
    times = ClerkTimes(poll_s=0.01, flush_s=0.01, now=lambda: NOW + WINDOW_S - 1 + 2 * steps.is_set())

    def hold(llm: FakeLLM) -> None:
        ends = time.monotonic() + 30
        while folder.state(late.id).status != "expired" and time.monotonic() < ends:
            if folder.state(waits.id).status == "cancelled":
                steps.set()  # time goes on
            time.sleep(0.01)

    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=hold), rules_of, times)
    with working(clerk):
        until(lambda: all_final(folder, first, waits, late))
    assert [folder.state(each.id).status for each in (first, waits, late)] == ["expired", "cancelled", "expired"]
    assert folder.state(waits.id).output_file is None


def run_until_final(
    folder: BatchFolder, *asked, now: float = NOW + 2, names=("other", "small"), on_step=lambda llm: None, **times
) -> list[str]:
    """By a clerk whose server serves these names; the owners of the batches in the order in which they were begun."""
    owners: list[str] = []

    def llm_for(owner: str) -> FakeLLM:
        owners.append(owner)
        return FakeLLM(on_step=on_step)

    others = lambda endpoint: rules_of(endpoint)._replace(names=names)  # noqa: E731
    how = {"poll_s": 0.01, "pause_s": 0.01, "now": lambda: now} | times
    with working(Clerk(folder, llm_for, others, ClerkTimes(**how))):
        until(lambda: all_final(folder, *asked))
    return owners


@pytest.mark.parametrize("names", [("other", "small"), ("other",)])
def test_a_batch_of_another_model_fails_with_the_rows_that_were_answered(folder, names):
    asked = asked_of(folder)
    begun(folder)
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
    begun(folder)
    if how == "cancelled":
        folder.cancel(asked.id, NOW + 5)
    run_until_final(folder, asked, now=NOW + 10 if how == "cancelled" else NOW + WINDOW_S, names=("other",))
    state = folder.state(asked.id)
    assert state.status == how and 0 < len(lines(folder, state.output_file)) == state.num_ok


def test_a_batch_that_waits_is_checked_again_under_other_names(folder):
    asked = asked_of(folder)
    folder.keep_state(asked.id, folder.state(asked.id).entered("in_progress", NOW, num_rows=26))
    run_until_final(folder, asked, names=("other",))
    state = folder.state(asked.id)
    assert state.status == "failed" and {error["code"] for error in state.errors} == {"model_not_found"}


def test_answers_that_cannot_be_read_are_kept(folder):
    asked = asked_of(folder)
    begun(folder)
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

    times = ClerkTimes(poll_s=0.005, flush_s=0.01, expiry_s=0.5, pause_s=0.01, now=lambda: now)
    clerk = Clerk(folder, lambda owner: FakeLLM(on_step=step), rules_of, times)
    with working(clerk):
        until(lambda: disk.num_refused > 20)
        assert folder.state(asked.id).status == "in_progress"
        now = now if how == "completed" else NOW + WINDOW_S
        until(lambda: disk.num_refused > 40)
        assert folder.state(asked.id).status == "in_progress"
        (line,) = [record for record in caplog.records if record.name == "ferrum_jax.serve"]
        assert "No space left" in line.getMessage() and line.exc_info is None
        disk.is_full = False
        until(lambda: folder.state(asked.id).is_final)
    state = folder.state(asked.id)
    assert state.status == how and not state.errors
    done = ids(lines(folder, state.output_file))
    assert len(done) == 24 if how == "completed" else 0 < len(done) < 24
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records][-1] == "it works again"


def test_a_clerk_begins_once_a_full_disk_has_room(folder, monkeypatch, caplog):
    asked, disk = asked_of(folder), Disk(monkeypatch)
    disk.is_full = True
    clerk = Clerk(folder, lambda owner: FakeLLM(), rules_of, ClerkTimes(poll_s=0.01, now=lambda: NOW + 1))
    with working(clerk):
        until(lambda: disk.num_refused >= 5)
        assert len(caplog.records) == 1
        disk.is_full = False
        until(lambda: all_final(folder, asked))
    assert folder.state(asked.id).status == "completed"


@pytest.mark.parametrize(("first_s", "pauses"), [(1.0, [1, 2, 4, 5, 5]), (9.0, [5, 5])])
def test_pauses_grow_until_it_works(monkeypatch, first_s, pauses):
    now = 100.0
    monkeypatch.setattr("ferrum_jax.io.system.monotonic", lambda: now)
    found = Pauses("it", first_s=first_s, most_s=5.0)
    for _ in range(2):
        for pause in pauses:
            found.begin(OSError("away"))
            now += pause - 0.1
            assert not found.is_over
            now += 0.2
            assert found.is_over
        found.end()


RECORDS = [
    b"",
    b"[]",
    b'{"status": "paused"}',
    b'{"status": "in_progress", "num_rows": "1"}',
    b'{"status": "in_progress", "errors": 5}',
    b'{"status": "in_progress", "times": {"in_progress": "now"}}',
    b'{"status": "validating", "of a later version": 1}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("end", [".json", ".state.json", ".end.json"])
def test_a_record_that_cannot_be_read_stops_its_batch_alone(folder, caplog, end):
    good = asked_of(folder, rows(1), created=NOW + 50)
    bad = [asked_of(folder, rows(1), created=NOW + i) for i in range(len(RECORDS))]
    for asked, content in zip(bad, RECORDS, strict=True):
        folder.store.replace(f"batches/{asked.id}{end}", content)
    other = BatchFolder(folder.root, most_stored_bytes=1 << 20)  # which has read none of them
    run_until_final(other, good)
    assert other.state(good.id).status == "completed"
    for asked in bad:
        assert folder.store.read(f"batches/{asked.id}{end}") is not None
        assert other.batch(asked.id) is None or other.state(asked.id) is None
        assert len([record for record in caplog.records if asked.id in record.getMessage()]) == 1


def test_keys_take_turns_and_what_was_begun_goes_on_first(folder):
    first = [asked_of(folder, rows(1), owner="a", created=NOW + i) for i in range(3)]
    others = [asked_of(folder, rows(1), owner=owner, created=NOW + 10) for owner in "bc"]
    folder.keep_state(first[2].id, folder.state(first[2].id).entered("in_progress", NOW, num_rows=1))
    owners = run_until_final(folder, *first, *others)
    assert owners[0] == "a" and {*owners[1:3]} == {"b", "c"} and owners[3:] == ["a", "a"]


def test_a_batch_that_fails_waits_while_others_are_answered(folder):
    broken, good = asked_of(folder, rows(3), owner="a"), asked_of(folder, rows(1), created=NOW + 1)
    folder.remove_file(broken.input_file)
    run_until_final(folder, good, pause_s=30.0)
    assert not folder.state(broken.id).is_final and folder.state(good.id).status == "completed"


def test_a_panic_in_a_batch_is_counted_and_ends_it(folder):

    asked = asked_of(folder, rows(1))
    run_until_final(folder, asked, on_step=raising(BaseException("a panic of a library")), pause_s=0.01)
    assert folder.state(asked.id).status == "failed" and folder.state(asked.id).errors[0]["code"] == "server_error"


def test_a_batch_of_updated_weights_goes_on_with_no_others_after_a_kill(folder):
    asked = asked_of(folder)
    llm = FakeLLM(identity=dataclasses.replace(IDENTITY, weights="00.1"))
    llm.on_step = lambda llm: llm.num_steps == 12 and clerk.end()
    clerk = Clerk(folder, lambda owner: llm, rules_of, ClerkTimes(poll_s=0.01, flush_s=0.01, now=lambda: NOW + 1))
    with working(clerk):
        until(lambda: llm.num_steps >= 12)
    run_until_final(folder, asked, names=("small",))  # the next server has the first weights again
    state = folder.state(asked.id)
    assert state.status == "failed" and 'weights "00.1", now "00"' in state.errors[0]["message"]
    assert 0 < len(lines(folder, state.output_file)) < 24


def test_a_key_that_has_too_many_batches_loses_its_oldest_ended_one(folder, monkeypatch):
    monkeypatch.setattr("ferrum_jax.serve.batches.batch_folder.MOST_BATCHES", 3)
    mine = [asked_of(folder, rows(1), owner="a", created=NOW + i) for i in range(3)]
    theirs = asked_of(folder, rows(1), owner="b", created=NOW - 5)
    with pytest.raises(FolderFull, match="3 batches wait or run, the most of one key"):
        asked_of(folder, rows(1), owner="a")
    run_until_final(folder, *mine, theirs)
    folder.cancel(mine[0].id, NOW)
    asked_of(folder, rows(1), owner="a", created=NOW + 3)
    assert folder.batch(mine[0].id) is None and folder.batch(theirs.id) == theirs
    assert {each.id for each in folder.batches()} >= {mine[1].id, mine[2].id, theirs.id}
    assert not [name for name in folder.store.names("batches") if name.startswith(mine[0].id)]


def test_files_that_come_at_once_have_room_for_all_of_them_or_are_refused(folder):
    content, count = bytes(200_000), 8
    begins = threading.Barrier(count)

    def keep(number: int) -> bool:
        begins.wait()
        try:
            folder.add_file(io.BytesIO(content), len(content), owner="", filename="a", purpose="batch", created=NOW)
        except FolderFull:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        kept = list(pool.map(keep, range(count)))
    assert sum(kept) == 5 == len(folder.files()), "5 files of 200,000 bytes fit 1 MiB"


def test_files_are_counted_by_key(folder, monkeypatch):
    monkeypatch.setattr("ferrum_jax.serve.batches.batch_folder.MOST_FILES", 2)
    for owner in "aab":
        asked_of(folder, rows(1), owner=owner)
    with pytest.raises(FolderFull, match="2 files are kept, the most of one key"):
        asked_of(folder, rows(1), owner="a")


def test_a_full_folder_takes_no_more(folder):
    with pytest.raises(FolderFull, match="2,000,000 bytes, and 0 of at most 1,048,576 are kept already"):
        folder.add_file(io.BytesIO(), 2_000_000, owner="", filename="a", purpose="batch", created=NOW)


def test_a_folder_may_be_a_bucket():
    folder = BatchFolder("memory://batches", most_stored_bytes=1 << 20)
    asked = asked_of(folder)
    run_until_final(folder, asked, names=("small",))
    state = folder.state(asked.id)
    assert ids(lines(folder, state.output_file)) == [*range(12), *range(14, 26)]
    assert state.status == "completed" and ids(lines(folder, state.error_file)) == [12, 13]
    folder.remove_file(folder.files()[0].id)
    assert len(folder.files()) == 2
