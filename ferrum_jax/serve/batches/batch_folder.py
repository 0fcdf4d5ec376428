"""BatchFolder: files and batches below a folder or URL, by their ids.

    files/ID.jsonl  files/ID.json              a file's content, then its record, without which there is no file
    batches/ID.json                            a batch as it was asked for
    batches/ID.cancel.json                     when it was asked to end
    batches/ID.state.json, batches/ID.end.json  how far it is, and how it ended, which clerks write
    jobs/ID.jsonl  jobs/ID.jsonl.journal/      the job that answers its rows, as `ferrum-jax batch` keeps one

Ids are random and checked before they are part of a name; nothing else that a client sends is. A record that cannot be
read is passed over, as if its file or batch were not there, with one line of log.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store, open_store
from ferrum_jax.serve.batches.stored import AskedBatch, BatchState, CancelMark, Record, StoredFile, read_record

Listed = TypeVar("Listed", StoredFile, AskedBatch)

_log = logging.getLogger("ferrum_jax.serve")
MOST_FILES, MOST_BATCHES = 10_000, 1000  # of one key
_COPY_BYTES = 1 << 20
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.EACCES)  # all else may be of the disk
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}", re.ASCII)


class FolderFull(ValueError):
    """No room for more; says what to delete."""


class BatchFolder:
    """Threads and processes may use one folder at once."""

    def __init__(self, root: str, *, most_stored_bytes: int) -> None:
        """root: a local path or URL. most_stored_bytes: of all files together."""
        self.root = root if root.endswith("://") else root.rstrip("/")
        self.store: Store = open_store(root)
        self._most_stored_bytes = most_stored_bytes
        self._files: dict[str, StoredFile] = {}  # records never change
        self._batches: dict[str, AskedBatch] = {}
        self._unread: set[str] = set()  # names of records that cannot be read
        self._lock = system.Lock()  # of who looks for room
        self._coming: dict[str, StoredFile] = {}  # by id: files that are being written, for which room is kept

    def path(self, name: str) -> str:
        """The path or URL of a name in the folder."""
        return f"{self.root}/{name}"

    # -- files -----------------------------------------------------------------------------------------

    def files(self) -> list[StoredFile]:
        """All files, the oldest first."""
        return self._records("files", self._files, self.file)

    def file(self, file_id: str) -> StoredFile | None:
        """A file by its id; None where there is none."""
        return self._record("files", self._files, StoredFile, file_id)

    def add_file(self, content: BinaryIO, num_bytes: int, *, is_owed: bool = False, **record: Any) -> StoredFile:
        """Keeps all that `content` has from its start on; a file of an id that is there is made anew.

        is_owed: it is kept however full the folder is, as answers are that have been computed. record: the other fields
        of a StoredFile. Raises FolderFull.
        """
        found = StoredFile(**{"id": f"file-{system.token_hex(16)}", **record}, num_bytes=num_bytes)
        content.seek(0)
        with contextlib.nullcontext() if is_owed else self._room(found):
            with self.store.writing(_content(found.id)) as file:
                shutil.copyfileobj(content, file, _COPY_BYTES)
            self.store.replace(f"files/{found.id}.json", _json(found))
        return found

    @contextlib.contextmanager
    def _room(self, new: StoredFile) -> Iterator[None]:
        """Keeps room for a file while it is written, beside others. Raises FolderFull."""
        with self._lock:
            there = {file.id: file for file in self.files()} | self._coming
            if sum(file.owner == new.owner for file in there.values()) >= MOST_FILES:
                raise FolderFull(f"{MOST_FILES:,} files are kept, the most of one key; delete some")
            total = sum(file.num_bytes for file in there.values())
            if total + new.num_bytes > self._most_stored_bytes:
                raise FolderFull(
                    f"the file has {new.num_bytes:,} bytes, and {total:,} of at most {self._most_stored_bytes:,} are "
                    "kept already; delete files that are not needed"
                )
            self._coming[new.id] = new
        try:
            yield
        finally:
            del self._coming[new.id]

    def content_path(self, file_id: str) -> str:
        """The path or URL of a file's content."""
        return self.path(_content(file_id))

    def read(self, file_id: str, start: int, length: int) -> bytes:
        """Some bytes of a file's content."""
        return self.store.read(_content(file_id), start, length) or b""

    def remove_file(self, file_id: str) -> None:
        """Deletes a file, its record first."""
        self.store.remove(f"files/{file_id}.json")
        self._files.pop(file_id, None)
        self.store.remove(_content(file_id))

    # -- batches ---------------------------------------------------------------------------------------

    def batches(self) -> list[AskedBatch]:
        """All batches, the oldest first."""
        return self._records("batches", self._batches, self.batch)

    def batch(self, batch_id: str) -> AskedBatch | None:
        """A batch by its id; None where there is none."""
        return self._record("batches", self._batches, AskedBatch, batch_id)

    def add_batch(self, **asked: Any) -> AskedBatch:
        """Begins a batch; a key's oldest one that has ended goes where it has too many. Raises FolderFull.

        asked: the fields of an AskedBatch but its id.
        """
        found = AskedBatch(id=f"batch_{system.token_hex(16)}", **asked)
        with self._lock:
            own = [each for each in self.batches() if each.owner == found.owner]
            if len(own) >= MOST_BATCHES:
                ended = next((each for each in own if (state := self.state(each.id)) and state.is_final), None)
                if ended is None:
                    raise FolderFull(
                        f"{len(own):,} batches wait or run, the most of one key; ask again when one has ended"
                    )
                self.remove_batch(ended.id)
            self.store.replace(f"batches/{found.id}.json", _json(found))
        return found

    def remove_batch(self, batch_id: str) -> None:
        """Deletes a batch that has ended, its record first; its files stay."""
        for end in ("", ".state", ".end", ".cancel"):
            self.store.remove(f"batches/{batch_id}{end}.json")
        self._batches.pop(batch_id, None)

    def cancel(self, batch_id: str, now: int) -> None:
        """Marks a batch to be ended; the first mark counts."""
        self.store.create(f"batches/{batch_id}.cancel.json", _json(CancelMark(at=now)))

    def cancelled_at(self, batch_id: str) -> int | None:
        """When a batch was asked to end; None where it was not. A mark that cannot be read is one, of time 0."""
        mark = self._read(CancelMark, f"batches/{batch_id}.cancel.json", damaged=CancelMark(at=0))
        return None if mark is None else mark.at

    def state(self, batch_id: str) -> BatchState | None:
        """How far a batch is; None where its record cannot be read."""
        begun = BatchState()
        ended = self._read(BatchState, f"batches/{batch_id}.end.json", absent=begun)
        return self._read(BatchState, f"batches/{batch_id}.state.json", absent=begun) if ended is begun else ended

    def keep_state(self, batch_id: str, state: BatchState) -> None:
        """The first end counts: a clerk that slept while another took over comes late."""
        if state.is_final:
            self.store.create(f"batches/{batch_id}.end.json", _json(state))
        else:
            self.store.replace(f"batches/{batch_id}.state.json", _json(state))

    # -- the jobs that answer them ---------------------------------------------------------------------

    def job_path(self, batch_id: str) -> str:
        """The path or URL of the output of a batch's job, whose folder is there from now on."""
        self.store.create("jobs/README", b"Jobs of batches that run; each is deleted when its batch has ended.\n")
        return self.path(f"jobs/{batch_id}.jsonl")

    def remove_job(self, batch_id: str) -> None:
        """Deletes what a batch's job has kept; its lines are in the batch's files."""
        for end in ("", ".report.json", ".journal"):
            self.store.remove(f"jobs/{batch_id}.jsonl{end}")

    def clear_jobs(self) -> None:
        """Deletes what is left of jobs whose batches have ended or are gone: a clerk was killed or slept as it did."""
        for batch_id in filter(_ID.fullmatch, {name.partition(".")[0] for name in self.store.names("jobs")}):
            is_there, state = self.store.size(f"batches/{batch_id}.json") is not None, self.state(batch_id)
            if not is_there or (state is not None and state.has_told_all):
                self.remove_job(batch_id)

    # -- records ---------------------------------------------------------------------------------------

    def _records(self, folder: str, known: dict[str, Listed], read: Callable[[str], Listed | None]) -> list[Listed]:
        ids = [name.removesuffix(".json") for name in self.store.names(folder) if name.endswith(".json")]
        there = {each for each in ids if _ID.fullmatch(each)}
        for gone in known.keys() - there:
            known.pop(gone, None)
        found = [record for each in there if (record := known.get(each) or read(each)) is not None]
        return sorted(found, key=lambda record: (record.created, record.id))

    def _record(self, folder: str, known: dict[str, Listed], kind: type[Listed], record_id: str) -> Listed | None:
        found = self._read(kind, f"{folder}/{record_id}.json") if _ID.fullmatch(record_id) else None
        if found is None or found.id != record_id:  # another server may have deleted it
            return None
        known[record_id] = found
        return found

    def _read(
        self, kind: type[Record], name: str, *, absent: Record | None = None, damaged: Record | None = None
    ) -> Record | None:
        """The record. damaged: of one that is no file, is damaged or of another version, which is logged once."""
        try:
            content = self.store.read(name)
            return absent if content is None else read_record(kind, content)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise
            if name not in self._unread:
                self._unread.add(name)
                _log.error("%s/%s cannot be read (%s); its file or batch is passed over", self.root, name, error)
            return damaged


def output_id(batch_id: str, what: str) -> str:
    """The id of a batch's output or errors: as hard to guess as the batch's own, and the same after a kill."""
    return f"file-{hashlib.blake2b(f'{batch_id} {what}'.encode(), digest_size=16).hexdigest()}"


def _content(file_id: str) -> str:
    return f"files/{file_id}.jsonl"


def _json(record: StoredFile | AskedBatch | BatchState | CancelMark) -> bytes:
    return json.dumps(dataclasses.asdict(record)).encode()


def page_of(records: Sequence[Mapping[str, Any]], after: str | None, limit: int) -> dict[str, Any] | None:
    """A list as OpenAI's clients read it. after: id behind which it begins; None where no record has that id."""
    ids = [record["id"] for record in records]
    if after is not None and after not in ids:
        return None
    start = 0 if after is None else ids.index(after) + 1
    data = list(records[start : start + limit])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(records),
    }
