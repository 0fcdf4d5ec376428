"""The output file as a journal: lines are appended as rows finish, and read again when the job goes on.

The file alone is the job's memory. Each line carries the row's content digest (in `id`) and `custom_id`;
lines with a body carry the job's recorded start and fingerprint. A line is handed to the system in one
write, so a killed process leaves whole lines and at most one torn tail without a newline, which the next
start cuts off; the row is then done again. A lock keeps a second job away from the file.

A line once written is never changed, and a non-null custom_id stands in one line only.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from pathlib import Path

from ferrum_jax.batch.responses import LINE_PREFIX

_SYNC_INTERVAL_S = 1.0  # lines survive a kill at once, and a loss of power after at most so long


@dataclasses.dataclass(kw_only=True, slots=True)
class Finished:
    """What a journal already holds; `created` and `fingerprint` are None until a line has a body."""

    ids: set[str] = dataclasses.field(default_factory=set)  # digests of finished lines
    id_of: dict[str, str] = dataclasses.field(default_factory=dict)  # custom_id -> digest
    num_failed: int = 0
    created: int | None = None
    fingerprint: str | None = None


class Journal:
    """An output file opened for appending. `finished` is what it held when it was opened.

    Raises OSError if the file cannot be written, ValueError if it holds lines that no batch job wrote or
    if another job has it open.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file; name a file for the output")
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115, closed by close()
        self._synced_s, self._is_synced = time.monotonic(), True
        try:
            self._lock(path)
            self.finished, length = _read(path)
            if self._file.seek(0, os.SEEK_END) > length:
                self._file.truncate(length)
        except BaseException:
            self._file.close()
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path} is being written by another job; wait for it or name another output") from error

    def append(self, line: bytes) -> None:
        """Adds one line, which ends in a newline; after this a kill of the process does not lose it."""
        while line:  # a full disk may take part of it; the next write then raises
            line = line[self._file.write(line) :]
        self._is_synced = False
        now_s = time.monotonic()
        if now_s - self._synced_s >= _SYNC_INTERVAL_S:
            self._sync()
            self._synced_s = now_s

    def _sync(self) -> None:
        if not self._is_synced:
            os.fsync(self._file.fileno())
            self._is_synced = True

    def close(self) -> None:
        """Makes all lines durable and lets the file go."""
        if not self._file.closed:
            try:
                self._sync()
            finally:
                self._file.close()


def _read(path: Path) -> tuple[Finished, int]:
    """What the whole lines of the file say, and their length in bytes; a torn tail is not counted."""
    finished, length = Finished(), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                if not line.startswith(LINE_PREFIX) and not LINE_PREFIX.startswith(line):
                    raise ValueError(_foreign(path, number))
                break
            _record(finished, line, path, number)
            length += len(line)
    return finished, length


def _record(finished: Finished, line: bytes, path: Path, number: int) -> None:
    try:
        entry = json.loads(line)
        digest, custom_id = entry["id"].removeprefix("batch_req_"), entry["custom_id"]
        body = None if entry["response"] is None else entry["response"]["body"]
        settings = None if body is None else (body["created"], body["system_fingerprint"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(_foreign(path, number)) from error
    if digest in finished.ids:
        raise ValueError(f"line {number} of {path} is there twice; name another output")
    finished.ids.add(digest)
    if custom_id is not None:
        finished.id_of[custom_id] = digest
    if settings is None:
        finished.num_failed += 1
        return
    if finished.fingerprint not in (None, settings[1]):
        raise ValueError(f"line {number} of {path} was written by a job with other settings; name another output")
    finished.created, finished.fingerprint = settings


def _foreign(path: Path, number: int) -> str:
    return f"line {number} of {path} is not a line of a batch job's output; move the file away or name another output"
