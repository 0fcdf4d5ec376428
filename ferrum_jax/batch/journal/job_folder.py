"""The place of a job: its output and, beside it, the folder of its journal."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.input.files import writing_rows
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal import job_identity
from ferrum_jax.batch.journal.journal import ROWS, Journal
from ferrum_jax.batch.journal.journal_file import file_of, object_in
from ferrum_jax.batch.journal.leases import Leases, is_idle, require_nobody
from ferrum_jax.batch.journal.merge import merge
from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store, split
from ferrum_jax.io.paths import is_url

_MERGED = "merged.json"  # what the output is that was written
_OF_PARTIAL = "partial.json"  # how many rows the partial output has
_MAX_TURNS, _TURN_S = 100, 0.1  # in which others that stop write it


class JobFolder:
    """The output and its journal, and what is known of the job as a whole."""

    def __init__(self, target: str, open_store: Callable[[str], Store]) -> None:
        folder, self.name = split(target)
        self.target = target
        self.output, self.journal = open_store(folder), open_store(f"{target}.journal")

    def record(self) -> dict[str, Any] | None:
        """The record of the job that was begun here, or None. Raises ValueError for a foreign one."""
        found = self.journal.read(job_identity.RECORD)
        return None if found is None else job_identity.read_record(found, self.target)

    def record_for(self, settings: Mapping[str, object], *, expiry_s: float, poll_s: float) -> dict[str, Any] | None:
        """The record of a job to be continued or refused with these settings, or None.

        Records from before the first row are removed: which model answers, and where settings are others now all
        of it, so that a typo in a command blocks no output. Raises ValueError as `record` does, and while a worker of
        other settings is at work.
        """
        record = self.record()
        if record is None or self._has_rows:
            return record
        is_other = bool(job_identity.changed_values(record["settings"], settings))
        if is_other:
            require_nobody(self.journal, expiry_s=expiry_s, poll_s=poll_s)
        if (is_other or is_idle(self.journal)) and not self._has_rows:
            for name in job_identity.BEFORE_ROWS if is_other else job_identity.OF_MODEL:
                self.journal.remove(name)
        return None if is_other else record

    @property
    def _has_rows(self) -> bool:
        begun = self.journal.size(ROWS) is not None or bool(self.journal.names("segments"))
        return begun or self.output.size(self.name) is not None

    def begin(self, settings: Mapping[str, object], names: Sequence[str], now: float) -> dict[str, Any]:
        """The job's record: the one that is there, or a new one. Raises ValueError for a job of other settings.

        names: by which rows may name the model. now: seconds since 1970.
        """
        found = self.journal.read(job_identity.RECORD)
        if found is None:
            orphans = self._orphans()
            found = self.journal.read(
                job_identity.RECORD
            )  # another worker may have begun the job, and gone on, since the first look
            if found is None and orphans is not None:
                raise ValueError(orphans)
        if found is None:
            self.journal.create(job_identity.RECORD, job_identity.new_record(settings, names, now))
            found = self.journal.read(job_identity.RECORD)  # another worker may have been first
            assert found is not None, "the job's record is gone"
        self._refuse_overwriting(found)
        record = job_identity.read_record(found, self.target)
        job_identity.refuse_changes(self.target, record["settings"], settings)
        return record

    def _orphans(self) -> str | None:
        """Says what is there of a job that needs the job's record; None without anything."""
        if self.output.size(self.name) is not None:
            return (
                f"{self.target} is there without its journal, {self.target}.journal, so it is not known what it "
                "holds; move it away, name another output, or have it moved aside with --new-run"
            )
        if self.journal.names("segments"):  # the folder was deleted under a worker, which then wrote on
            return (
                f"{self.target}.journal has rows of a job and not that job's record, {job_identity.RECORD}, so it is "
                "not known what answered them; put the record back, move the folder away, or name another output"
            )
        return None

    def set_aside(self, *, expiry_s: float, poll_s: float) -> str | None:
        """Moves output, report and journal to the first free `old-N.NAME`; that path, None where nothing is there.

        The old job may be continued under that name. Raises ValueError while a worker is at work on it.
        """
        journal, report = f"{self.name}.journal", f"{self.name}.report.json"
        begun = self.journal.read(job_identity.RECORD) is not None
        files = [name for name in (self.name, report) if self.output.size(name) is not None]
        if not begun and not files:
            return None
        workers = require_nobody(self.journal, expiry_s=expiry_s, poll_s=poll_s) if begun else []
        number = next(number for number in itertools.count(1) if self._is_free(f"old-{number}.{self.name}"))
        for name in files:
            self.output.move(name, f"old-{number}.{name}", mark="")
        if begun:
            self.output.move(journal, f"old-{number}.{journal}", mark=job_identity.RECORD)
        for worker in workers:  # one that only slept finds it here
            self.journal.create(f"workers/{worker}.dead", b"")
        return f"{self.target[: len(self.target) - len(self.name)]}old-{number}.{self.name}"

    def _is_free(self, name: str) -> bool:
        taken = (name, f"{name}.report.json", f"{name}.journal/{job_identity.RECORD}")
        return all(self.output.size(each) is None for each in taken)

    def _refuse_overwriting(self, record: bytes) -> None:
        """Raises ValueError if the store makes a file anew that is there: no lease would hold on it."""
        if is_url(self.target) and self.journal.create(job_identity.RECORD, record):
            raise ValueError(
                f"{self.target} is on a store that has no conditional writes: it made a file that was there already, "
                "so two workers could run the same rows; name an output on another store or on this machine"
            )

    def is_merged(self, layout: str) -> bool:
        """Whether the output is there and holds a line for each of these rows."""
        merged = self._merged(layout)
        return merged is not None and self.output.size(self.name) == merged.get("bytes")

    def digest(self, layout: str) -> str | None:
        """The digest of the output of these rows; None before it is there, and where an older version wrote it."""
        merged = self._merged(layout)
        return None if merged is None else merged.get("digest")

    def _merged(self, layout: str) -> dict[str, Any] | None:
        found = object_in(self.journal.read(_MERGED))
        return found if found is not None and found.get("layout") == layout else None

    def merge_partial(self, rows: Rows, journal: Journal, leases: Leases) -> str | None:
        """Writes the lines that are there, in the order of the input, to a file of the journal; its path.

        Workers that stop at one moment do so in turn, so the last of them has all rows. None where there is no line, or
        others take too long.
        """
        for _ in range(_MAX_TURNS):
            if (epoch := leases.acquire("partial")) is not None:
                path = self._merge_partial(rows, journal)
                leases.give("partial", epoch + 1)
                return path
            system.sleep(_TURN_S)
        return None

    def _merge_partial(self, rows: Rows, journal: Journal) -> str | None:
        """Writes them, unless another worker has written as many; its path."""
        journal.refresh()
        found = {"layout": rows.layout, "rows": journal.num_ok + journal.num_failed + rows.num_bad}
        if not found["rows"]:
            return None
        name = f"partial.{self.name}"
        if self.journal.size(name) is None or object_in(self.journal.read(_OF_PARTIAL)) != found:
            with self.journal.writing(name) as output, writing_rows(output, name) as lines:
                merge(rows, journal, lines)
            self.journal.replace(_OF_PARTIAL, file_of(found))
        return f"{self.target}.journal/{name}"

    def merge(self, rows: Rows, journal: Journal) -> None:
        with self.output.writing(self.name) as output, writing_rows(output, self.name) as lines:
            digest = merge(rows, journal, lines)
        merged = {"layout": rows.layout, "bytes": self.output.size(self.name), "digest": digest}
        self.journal.replace(_MERGED, file_of(merged))
        for name in (f"partial.{self.name}", _OF_PARTIAL):  # of a run that was stopped: it says less
            self.journal.remove(name)
