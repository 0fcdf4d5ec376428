"""Outputs that a job goes on from: each whole, and as the report beside it says that it was written."""

import contextlib
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from ferrum_jax.batch.input.files import check_name, reading_rows
from ferrum_jax.batch.journal.job_record import JobRecord, record_of
from ferrum_jax.batch.journal.line_record import OutputDigest
from ferrum_jax.batch.verify.output_lines import Line, line_in
from ferrum_jax.io.files.store import open_local

_AS_WRITTEN = re.compile(rb', "response": null, "error": \{|, "error": null\}\n\Z')  # in a text quotes are escaped


class EarlierOutput(NamedTuple):
    """An output, its record, and its lines as JSON to read and to seek in."""

    path: str
    record: JobRecord
    file: BinaryIO

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line as the job wrote it, in the output's order, and where it lies in `file`.

        Raises ValueError, at the end too, for an output that is not what its report says: use nothing before.
        """
        digest, offset = OutputDigest(), 0
        self.file.seek(0)
        for number, raw in enumerate(self.file):
            try:  # lines of columns have another form
                line = raw if _AS_WRITTEN.search(raw) else line_in(raw).as_written
            except ValueError as error:
                raise ValueError(f"line {number + 1} of {self.path} {error}; {_CHANGED}") from error
            digest.add(number, line)
            yield offset, line
            offset += len(raw)
        if digest.text != self.record.output:
            raise ValueError(f"{self.path} is not what {self.path}.report.json says was written; {_CHANGED}")

    def line(self, offset: int) -> Line:
        """A line by its place. Raises OSError where its own digest is not that of what it says."""
        self.file.seek(offset)
        line = line_in(self.file.readline())
        if not line.is_intact:
            raise OSError(f"{self.path} changed while the job ran; start the job again")
        return line


_CHANGED = "it was edited or cut off, so no answer of it is taken; `ferrum-jax verify` shows where"


@contextlib.contextmanager
def opened(path: str) -> Iterator[EarlierOutput]:
    """Raises ValueError or OSError for an output without a report, and for a report that was edited."""
    check_name(path)
    record = record_of(path, None)
    if record.changes:
        raise ValueError(f"{record.changes[0]}; no answer of {path} is taken")
    with open_local(path) as raw, reading_rows(raw, path) as file:
        yield EarlierOutput(path, record, file)
