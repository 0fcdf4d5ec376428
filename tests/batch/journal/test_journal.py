"""The journal holds whole records only: what is torn is dropped, what is foreign is named, the later epoch counts."""

import errno
import json
import re
import sys

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal import CRASH, FAILED, OK, PARTIAL, Journal
from ferrum_jax.batch.journal.partials import decode_partial, encode_partial
from ferrum_jax.io.files.store import LocalStore, Store, UrlStore, open_local, open_store, split
from ferrum_jax.io.paths import install_command
from tests.batch.conftest import NAMES
from tests.batch.fake_llm import answer


def line(name: str, text: str = "") -> bytes:
    return json.dumps({"custom_id": name, "text": text}).encode()


def content(journal: Journal, store: Store) -> dict[int, bytes]:
    """The line of each finished row."""
    found = {}
    for name, indices, offsets, lengths in journal.lines():
        segment = store.read(name)
        for index, offset, length in zip(indices, offsets.tolist(), lengths.tolist(), strict=True):
            found[index] = segment[offset : offset + length]
    return found


def test_what_is_flushed_is_there_for_every_reader_and_what_is_not_is_not(store, rows):
    journal = Journal(store, rows, "w1")
    journal.append(OK, 0, line("a"), 1)
    journal.append(FAILED, 2, line("c"), 1)
    assert (journal.num_ok, journal.num_failed) == (0, 0)
    journal.flush()
    journal.append(OK, 1, line("b"), 1)
    other = Journal(store, rows, "w2")
    other.refresh()
    assert (journal.num_ok, journal.num_failed, other.num_ok, other.num_failed) == (1, 1, 1, 1)
    assert other.unfinished(rows.order).tolist() == [1] and not other.is_complete
    journal.flush()
    other.refresh()
    assert other.is_complete
    assert content(other, store) == content(journal, store) == {i: line(n) + b"\n" for i, n in enumerate(NAMES)}


def test_a_tail_torn_at_any_byte_is_dropped_and_the_whole_records_stay(store, rows):
    journal = Journal(store, rows, "w1")
    journal.append(OK, 0, line("a"), 1)
    journal.append(OK, 1, line("b", "long " * 9), 1)
    journal.flush()
    (name,) = store.names("segments")
    whole = store.read(f"segments/{name}")
    first = whole.index(b"\n") + 1
    for end in range(len(whole)):
        store.replace(f"segments/{name}", whole[:end])
        torn = Journal(store, rows, "w2")
        torn.refresh()
        assert torn.num_ok == (end >= first) and torn.num_torn == (end not in (0, first))


def test_a_changed_byte_is_seen(store, rows):
    journal = Journal(store, rows, "w1")
    journal.append(OK, 0, line("a", "abc"), 1)
    journal.flush()
    (name,) = store.names("segments")
    store.replace(f"segments/{name}", store.read(f"segments/{name}").replace(b"abc", b"abd"))
    other = Journal(store, rows, "w2")
    other.refresh()
    assert other.num_ok == 0 and other.num_torn == 1


def test_of_two_lines_of_one_epoch_which_two_layouts_have_all_readers_count_the_same(store, rows):
    first, second = Journal(store, rows, "w1"), Journal(store, rows, "w2")
    for journal, text in ((second, "of w2"), (first, "of w1")):
        journal.append(OK, 0, line("a", text), 1)
        journal.flush()
    reader = Journal(store, rows, "w3")
    for journal in (first, second, reader):
        journal.refresh()
    assert [content(each, store) for each in (first, second, reader)] == [{0: line("a", "of w1") + b"\n"}] * 3


def test_the_later_epoch_of_two_lines_counts_in_any_reading_order(store, rows):
    late, early = Journal(store, rows, "w0"), Journal(store, rows, "w1")
    late.append(OK, 0, line("a", "of the owner"), 2)
    early.append(FAILED, 0, line("a", "of the zombie"), 1)
    for journals in ((late, early), (early, late)):
        for journal in journals:
            journal.flush()
        other = Journal(store, rows, "w3")
        other.refresh()
        assert (other.num_ok, other.num_failed) == (1, 0) and b"of the owner" in content(other, store)[0]


def test_rows_that_the_input_does_not_have_are_named(store, rows, tmp_path):
    journal = Journal(store, rows, "w1")
    journal.append(OK, 0, line("a"), 1)
    journal.flush()
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"custom_id": "a", "prompt": "y"}) + "\n")
    with open(path, "rb") as file, pytest.raises(ValueError, match=r"whose content was another: 'a' \(1 in all\)"):
        Journal(store, Rows(file), "w2").refresh()


def test_a_row_in_progress_comes_back_with_all_bits_until_it_is_finished(store, rows):
    row = rows.read(1)
    assert isinstance(row, Row)
    output = answer("x", row.params)
    journal = Journal(store, rows, "w1")
    journal.append(PARTIAL, 1, b"[]", 1)
    journal.append(PARTIAL, 1, encode_partial(output.outputs), 1)
    journal.append(CRASH, 1, b"RuntimeError", 1)
    journal.flush()
    other = Journal(store, rows, "w2")
    other.refresh()
    assert [c.token_ids for c in other.partial(1)] == [c.token_ids for c in output.outputs]
    assert other.partial(0) == () and other.num_crashes == {1: 1}
    other.append(OK, 1, line("b"), 1)
    other.flush()
    assert other.partial(1) == ()


def test_a_partial_keeps_tokens_logprobs_ends_and_the_text_of_what_ended(rows):
    row = rows.read(0)
    assert isinstance(row, Row)
    values = {**{f: getattr(row.params, f) for f in row.params.__dataclass_fields__}, "logprobs": 2}
    output = answer("x", type(row.params)(**values))
    for before, after in zip(output.outputs, decode_partial(encode_partial(output.outputs)), strict=True):
        for name in ("index", "token_ids", "finish_reason", "stop_reason", "text"):
            assert getattr(before, name) == getattr(after, name)
        assert [[(t, p.logprob, p.rank) for t, p in e.items()] for e in before.logprobs] == [
            [(t, p.logprob, p.rank) for t, p in e.items()] for e in after.logprobs
        ]


def test_a_name_is_made_once_and_replaced_whole(store):
    assert store.create("x/one", b"first") and not store.create("x/one", b"second")
    assert store.read("x/one") == b"first" and store.read("x/one", 1, 3) == b"irs" and store.size("x/one") == 5
    store.replace("x/one", b"third")
    assert store.read("x/one") == b"third" and store.names("x") == ["one"]
    assert store.read("x/none") is None and store.size("x/none") is None and store.names("none") == []
    with store.writing("out") as file:
        file.seek(2)
        file.write(b"b\n")
        file.seek(0)
        file.write(b"a\n")
    assert store.read("out") == b"a\nb\n"
    with pytest.raises(RuntimeError), store.writing("out") as file:
        file.write(b"half")
        raise RuntimeError
    assert store.read("out") == b"a\nb\n"


def test_what_a_flush_could_not_write_the_next_one_writes(store, rows, monkeypatch):
    journal = Journal(store, rows, "w1")
    journal.append(OK, 0, line("a"), 1)
    create = type(store).create
    monkeypatch.setattr(type(store), "create", lambda *_, **how: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        journal.flush()
    monkeypatch.setattr(type(store), "create", create)
    journal.append(OK, 1, line("b"), 1)
    journal.flush()
    assert content(journal, store) == {0: line("a") + b"\n", 1: line("b") + b"\n"}


def test_a_path_is_split_into_folder_and_name():
    assert split("a/b.jsonl") == ("a", "b.jsonl") and split("b.jsonl") == (".", "b.jsonl")
    assert split("/b.jsonl") == ("/", "b.jsonl") and split("gs://b/a/c.jsonl") == ("gs://b/a", "c.jsonl")


def test_a_file_at_the_root_of_a_url_is_written_there_and_not_to_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, name = split("memory://out.jsonl")
    open_store(folder).replace(name, b"{}")
    with open_local("memory://out.jsonl") as file:
        assert file.read() == b"{}"
    assert not list(tmp_path.iterdir())
    MemoryFileSystem().rm("/out.jsonl")


class ObjectStore(MemoryFileSystem):
    """A refused write is called as the store likes. says: before each create, what is raised instead, or None."""

    cachable = False

    def __init__(self, says=()):
        super().__init__()
        self.says = list(says)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if mode == "create" and self.says and (error := self.says.pop(0)) is not None:
            raise error
        super().pipe_file(path, value, mode=mode, **kwargs)


def test_a_taken_name_is_taken_in_whatever_words_the_store_says_so(tmp_path):
    words = OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold")
    store = UrlStore(ObjectStore([None, words]), f"{tmp_path}/j")
    assert store.create("x", b"first") and not store.create("x", b"second") and store.read("x") == b"first"


def test_a_name_that_two_were_refused_for_asking_at_one_moment_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ferrum_jax.io.files.store._MAX_PAUSE_S", 0.0)
    conflict = OSError(errno.EIO, "a conflicting conditional operation is in progress")
    store = UrlStore(ObjectStore([conflict, conflict]), f"{tmp_path}/j")
    assert store.create("x", b"first") and store.read("x") == b"first"
    full = UrlStore(ObjectStore([conflict] * 9), f"{tmp_path}/j")
    with pytest.raises(OSError, match=r"memory://.*/j/y: .*a conflicting conditional operation"):
        full.create("y", b"")


def test_a_clients_own_errors_and_a_missing_bucket_are_os_errors_that_name_the_url(tmp_path, monkeypatch):
    class NoCredentials(Exception):
        pass

    monkeypatch.setattr("ferrum_jax.io.files.store._MAX_PAUSE_S", 0.0)
    system = ObjectStore([FileNotFoundError("b/o")] * 9)
    store = UrlStore(system, f"{tmp_path}/j")
    with pytest.raises(FileNotFoundError, match=r"no such file or bucket: 'memory://.*/j/x'"):
        store.create("x", b"")

    def refuse(*args, **kwargs):
        raise NoCredentials("Unable to locate credentials")

    for name in ("pipe_file", "cat_file", "size", "ls", "put_file", "open"):
        monkeypatch.setattr(MemoryFileSystem if name == "open" else system, name, refuse)

    def write() -> None:
        with store.writing("x") as file:
            file.write(b"content")

    calls = (lambda: store.create("x", b""), lambda: store.replace("x", b""), lambda: store.read("x"))
    for call in (*calls, lambda: store.size("x"), lambda: store.names("x"), write):
        with pytest.raises(OSError, match=r"memory://.*/j/x: Unable to locate credentials"):
            call()
    with pytest.raises(OSError, match=r"memory://in.jsonl: Unable to locate"), open_local("memory://in.jsonl"):
        pass


def test_a_url_of_a_file_is_the_file(tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"{}")
    with open_local(f"file://{tmp_path}/in.jsonl") as file:
        assert file.read() == b"{}"
    assert isinstance(open_store(f"file://{tmp_path}/j"), LocalStore)
    missing = re.escape(f"'file://{tmp_path}/none'")
    with pytest.raises(FileNotFoundError, match=missing), open_local(f"file://{tmp_path}/none"):
        pass


@pytest.mark.parametrize(
    ("missing", "message"),
    [("s3fs", "Install s3fs to access S3"), ("fsspec", re.escape(f"needs fsspec; {install_command('store')}"))],
)
def test_a_url_whose_package_is_missing_says_which_to_install(monkeypatch, missing, message):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=f"s3://x/j .*{message}"):
        open_store("s3://x/j")
    with pytest.raises(ValueError, match=f"s3://x/in.jsonl .*{message}"), open_local("s3://x/in.jsonl"):
        pass


def test_what_is_removed_is_gone_with_all_that_is_in_it(store):
    for name in ("a", "folder/b", "folder/below/c"):
        store.replace(name, b"x")
    for name in ("folder", "folder", "nothing"):
        store.remove(name)
    assert store.names("folder") == [] and store.read("folder/below/c") is None and store.read("a") == b"x"
    store.remove("a")
    assert store.size("a") is None
    store.replace("folder/b", b"y")
    assert store.read("folder/b") == b"y"
