"""The journal: what became of each row, in segments that are written whole and never changed.

A segment holds records, one a line, each with a checksum, an epoch and the digest of its row, so a torn or damaged
tail is seen and dropped. A record is a row's output line, the tokens of a row in progress, or that the engine crashed
while the row ran. The epoch is that of the lease under which the row ran. A worker wrongly declared dead, or rows that
are added to the input of a running job, can leave two lines for a row; all readers take the later epoch's.
"""

import json
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal_file import file_of
from ferrum_jax.batch.journal.line_record import usage_in
from ferrum_jax.batch.journal.partials import decode_partial
from ferrum_jax.core.outputs import CompletionOutput
from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store

OK, REUSED, FAILED, PARTIAL, CRASH = b"ok", b"reused", b"failed", b"partial", b"crash"
_TODO, _IS_OK, _IS_FAILED, _IS_REUSED = range(4)
_STATE_OF = {OK: _IS_OK, FAILED: _IS_FAILED, REUSED: _IS_REUSED}
_ANSWERED = (_IS_OK, _IS_REUSED)
_FLUSH_BYTES = 4 << 20  # more than this is not kept back
_MAX_NAMED = 5
ROWS = "rows.json"  # made before the first segment: a bucket may list that late, and tells at once what has a name


class _Place(NamedTuple):
    """Where a record's payload lies."""

    segment: int
    offset: int
    length: int
    epoch: int


class _Record(NamedTuple):
    """The books' entry for a record whose payload lies at `offset` in its segment."""

    kind: bytes
    index: int
    epoch: int
    offset: int
    length: int
    tokens: tuple[int, int]  # of an answer, as of `usage_in`


class Journal:
    """The records of a job, for one worker that adds to them. Two threads may use it."""

    def __init__(self, store: Store, rows: Rows, worker: str) -> None:
        self._store, self._rows, self._worker = store, rows, worker
        self._segments: list[str] = []
        self._known: set[str] = set()
        self._state = np.zeros(len(rows), np.uint8)
        self._counts = np.zeros(4, np.int64)  # rows by state
        self._segment = np.zeros(len(rows), np.uint32)
        self._offset = np.zeros(len(rows), np.uint32)
        self._length = np.zeros(len(rows), np.uint32)
        self._epoch = np.zeros(len(rows), np.uint16)
        self._tokens = np.zeros((len(rows), 2), np.uint32)  # that a row's answer read and wrote
        self._partials: dict[int, _Place] = {}
        self.num_crashes: dict[int, int] = {}  # by row
        self.num_torn = 0  # segments whose tail was dropped
        self.busy_s = 0.0  # in append and flush, of both threads; those of the other one cost the loop less
        self._pending, self._pending_records = bytearray(), list[_Record]()
        self._num_written = 0
        self._books, self._writing = system.Lock(), system.Lock()

    # -- what is known -----------------------------------------------------------------------------------

    @property
    def num_ok(self) -> int:
        """Rows whose line is durable and holds an answer."""
        return int(self._counts[list(_ANSWERED)].sum())

    @property
    def num_reused(self) -> int:
        """Rows whose answer an earlier job gave."""
        return int(self._counts[_IS_REUSED])

    @property
    def num_failed(self) -> int:
        return int(self._counts[_IS_FAILED])

    @property
    def usage(self) -> tuple[int, int] | None:
        """Tokens that all answers read and wrote; None where a line does not say it, such as that of a sound."""
        tokens = self._tokens[np.isin(self._state, _ANSWERED)]
        reads, writes = tokens.sum(axis=0, dtype=np.int64).tolist()
        return (reads, writes) if tokens[:, 0].all() else None

    @property
    def num_undone(self) -> int:
        """Rows without a durable line."""
        return len(self._rows.order) - self.num_ok - self.num_failed

    @property
    def is_complete(self) -> bool:
        return not self.num_undone

    def unfinished(self, indices: np.ndarray) -> np.ndarray:
        return indices[self._state[indices] == _TODO]

    def partial(self, index: int) -> tuple[CompletionOutput, ...]:
        """The choices of a row in progress as they were journaled last; none if there is nothing to go on from."""
        place = self._partials.get(index)
        if place is None:
            return ()
        return decode_partial(self.read(self._segments[place.segment], place.offset, place.length))

    def read(self, segment: str, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of a segment. Raises OSError where it is no longer there."""
        content = self._store.read(segment, start, length)
        if content is None:
            raise OSError(f"{segment} of the journal has vanished; start the job again")
        return content

    def refresh(self) -> None:
        """Reads the segments that are new. Raises ValueError if they hold rows that the input does not."""
        strange: list[str] = []
        for name in sorted(self._store.names("segments")):
            path = f"segments/{name}"
            if path not in self._known and not name.startswith(f"{self._worker}."):  # its own are booked by `flush`
                content = self.read(path)
                with self._books:
                    self._book(path, content, strange)
        if strange:
            named = ", ".join(strange[:_MAX_NAMED]) + (", ..." if len(strange) > _MAX_NAMED else "")
            raise ValueError(
                f"the journal has rows that are not in the input, or whose content was another: {named} "
                f"({len(strange)} in all); give the input that the job was begun with, give changed rows another "
                "custom_id, or name another output"
            )

    def lines(self) -> Iterator[tuple[str, list[int], np.ndarray, np.ndarray]]:
        """Each segment that has lines which count: its name, the rows, the lines' offsets and their lengths."""
        finished = np.flatnonzero(self._state != _TODO)
        by_segment = finished[np.argsort(self._segment[finished], kind="stable")]
        bounds = np.flatnonzero(np.diff(self._segment[by_segment])) + 1
        for part in np.split(by_segment, bounds) if len(by_segment) else ():
            yield self._segments[self._segment[part[0]]], part.tolist(), self._offset[part], self._length[part]

    def failed(self) -> Iterator[dict]:
        """The lines of rows that failed while they ran, in the order of the input."""
        for index in np.flatnonzero(self._state == _IS_FAILED).tolist():
            name, start, length = self._segments[self._segment[index]], self._offset[index], self._length[index]
            yield json.loads(self.read(name, int(start), int(length)))

    def answers(self, most_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Rows that have an answer and their lines, of the newest segments first, about so many bytes of them."""
        for name, rows, offsets, lengths in reversed(list(self.lines())):
            if most_bytes <= 0:
                return
            content = self.read(name)
            for index, start, length in zip(rows, offsets.tolist(), lengths.tolist(), strict=True):
                if self._state[index] in _ANSWERED:
                    most_bytes -= length
                    yield index, content[start : start + length]

    def lengths(self) -> np.ndarray:
        """[rows] of each row's output line in bytes, 0 where it has none."""
        return np.where(self._state != _TODO, self._length, 0).astype(np.int64)

    # -- what is added -----------------------------------------------------------------------------------

    def append(self, kind: bytes, index: int, payload: bytes, epoch: int) -> None:
        """Adds a record; it is durable after the next flush. payload: without newline."""
        started_s = system.perf_counter()
        content = b"%s %d %s %s" % (kind, epoch, self._rows.digest(index).encode(), payload)
        record = b"%08x %s\n" % (zlib.crc32(content), content)
        with self._books:
            self._pending += record
            end = len(self._pending)
            self._pending_records.append(_record(kind, index, epoch, end - 1, payload))
            is_full = end > _FLUSH_BYTES
            self.busy_s += system.perf_counter() - started_s
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Writes what was added as one segment, durable when this returns. If it raises, the next flush writes it."""
        with self._writing:
            with self._books:
                content, records = bytes(self._pending), self._pending_records
                self._pending, self._pending_records = bytearray(), []
            if not records:
                return
            started_s = system.perf_counter()
            try:
                name = self._write(content)
            except BaseException:  # a signal too: the job flushes once more before it ends
                self._put_back(content, records)
                raise
            with self._books:
                self._book_records(name, records)
                self.busy_s += system.perf_counter() - started_s

    def _write(self, content: bytes) -> str:
        """The name of a new segment. Each try has its own, because one that was interrupted may have made its file."""
        if not self._num_written:
            self._store.create(ROWS, file_of({}))
        name = f"segments/{self._worker}.{self._num_written:06d}"
        self._num_written += 1
        # no other worker has this name: if it is there, a client repeated a write whose answer was lost
        if not self._store.create(name, content) and self._store.read(name) != content:
            raise OSError(f"{name} of the journal is there already; start the job again")
        return name

    def _put_back(self, content: bytes, records: list[_Record]) -> None:
        """Makes what was not written pending again, before what was added meanwhile."""
        with self._books:
            later = [record._replace(offset=record.offset + len(content)) for record in self._pending_records]
            self._pending, self._pending_records = bytearray(content) + self._pending, records + later

    def _book(self, path: str, content: bytes, strange: list[str]) -> None:
        records, start = list[_Record](), 0
        while start < len(content):
            end = content.find(b"\n", start)
            record = content[start:end]
            if end < 0 or not _is_whole(record):
                self.num_torn += 1
                break
            _, kind, epoch, digest, payload = record.split(b" ", 4)
            index = self._rows.find(digest.decode())
            if index is None:
                strange.append(_name(payload))
            else:
                records.append(_record(kind, index, int(epoch), end, payload))
            start = end + 1
        self._book_records(path, records)

    def _book_records(self, path: str, records: list[_Record]) -> None:
        """Books the records of one segment: its lines at once, for they are most of them."""
        self._segments.append(path)
        self._known.add(path)
        segment = len(self._segments) - 1
        lines: dict[int, _Record] = {}
        for record in records:
            kind, index, epoch, offset, length, _ = record
            if kind in _STATE_OF:
                if index not in lines or epoch > lines[index].epoch:
                    lines[index] = record
            elif kind == CRASH:
                self.num_crashes[index] = self.num_crashes.get(index, 0) + 1
            else:
                known = self._partials.get(index)
                if not self._state[index] and (known is None or epoch >= known.epoch):
                    self._partials[index] = _Place(segment, offset, length, epoch)
        if lines:
            self._book_lines(segment, list(lines.values()))

    def _book_lines(self, segment: int, lines: list[_Record]) -> None:
        """Books lines of different rows; of a row that has one already the later epoch's counts.

        Two layouts have epochs of their own, so two lines may have one: the segment of the lesser name then counts.
        """
        indices = np.array([line.index for line in lines])
        epochs = np.array([line.epoch for line in lines], self._epoch.dtype)
        is_todo = self._state[indices] == _TODO
        counts = is_todo | (epochs > self._epoch[indices])
        for place in np.flatnonzero(~is_todo & (epochs == self._epoch[indices])).tolist():
            counts[place] = self._segments[segment] < self._segments[self._segment[indices[place]]]
        indices, lines = indices[counts], [line for line, count in zip(lines, counts.tolist(), strict=True) if count]
        before = np.bincount(self._state[indices], minlength=len(self._counts))
        self._segment[indices], self._epoch[indices] = segment, epochs[counts]
        self._offset[indices] = [line.offset for line in lines]
        self._length[indices] = [line.length + 1 for line in lines]
        self._tokens[indices] = np.array([line.tokens for line in lines]).reshape(-1, 2)
        self._state[indices] = [_STATE_OF[line.kind] for line in lines]
        self._counts += np.bincount(self._state[indices], minlength=len(self._counts)) - before
        for index in indices.tolist() if self._partials else ():
            self._partials.pop(index, None)


def _record(kind: bytes, index: int, epoch: int, end: int, payload: bytes) -> _Record:
    """end: of the payload in its segment."""
    return _Record(kind, index, epoch, end - len(payload), len(payload), usage_in(payload))


def _is_whole(record: bytes) -> bool:
    checksum, _, content = record.partition(b" ")
    return checksum == b"%08x" % zlib.crc32(content)


def _name(payload: bytes) -> str:
    """The custom_id of a record's line, or that it has none."""
    found = json.loads(payload) if payload.startswith(b"{") else {}
    return repr(found["custom_id"]) if "custom_id" in found else "a row in progress"
