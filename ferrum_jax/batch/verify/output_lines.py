"""The lines of an output, read one after the other: each is compared with its row, its record and the report.

This needs no model, so it is done with every line. It finds lines that are gone, doubled, moved or foreign, requests
that are others than those of the input, and every answer that a job would have written otherwise.
"""

import re
from collections import Counter
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ferrum_jax.batch.input.formats import BadRow
from ferrum_jax.batch.input.lines import LineError, load_value
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_record import JobRecord
from ferrum_jax.batch.journal.line_record import LINE, RECORD, OutputDigest, json_of, line_of, recorded_response
from ferrum_jax.batch.journal.responses import failed_line
from ferrum_jax.batch.verify.findings import MAX_OF_A_KIND, Findings
from ferrum_jax.io.error_text import quoted

_ID = re.compile(r"batch_req_([0-9a-f]{32})")


class Line(NamedTuple):
    """A line of an output. response, error: objects as they were read, None where there is none."""

    id: str  # 32 hex digits
    custom_id: str | None
    response: Any
    error: Any

    @property
    def as_written(self) -> bytes:
        """The bytes of the line as a job writes it."""
        texts = ["null" if each is None else json_of(each) for each in (self.response, self.error)]
        return line_of(self.id, self.custom_id, *texts)

    @property
    def is_intact(self) -> bool:
        """Whether an answer has the digest of what it says."""
        others = {name: value for name, value in self.response[RECORD].items() if name != LINE}
        response = recorded_response(self.id, self.custom_id, self.response["body"], others)
        return self.as_written == line_of(self.id, self.custom_id, response, "null")


def line_in(raw: bytes) -> Line:
    """Raises ValueError for what is no line of an output."""
    value = load_value(raw)
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, and must be an object")
    id = _ID.fullmatch(str(value.get("id")))
    if id is None:
        raise ValueError(f"has the id {quoted(value.get('id'))}, and must have batch_req_ and 32 hex digits")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str | None):
        raise ValueError(f"has the custom_id {quoted(custom_id)}, and must have a text")
    if unknown := sorted(set(value) - {"id", "custom_id", "response", "error"}):
        raise ValueError(f"has the fields {quoted(unknown)}, which no job writes")
    return Line(id[1], custom_id, *(_object(value.get(name), name) for name in ("response", "error")))


def _object(value: Any, name: str) -> Any:
    """value: of a file with columns, JSON as text."""
    found = load_value(value.encode()) if isinstance(value, str) else value
    if not isinstance(found, dict | None):
        raise ValueError(f"has a {name} that is {quoted(found)}, and must have an object or null")
    return found


class OutputLines:
    """The lines of an output; what is wrong with them goes to the findings.

    suspects: rows whose line was found wrong and can be compared with what is answered again. num_lines: of any form.
    """

    def __init__(self, file: BinaryIO, rows: Rows, record: JobRecord, findings: Findings) -> None:
        """file: JSON lines, to read and to seek in."""
        self._file, self._rows, self._job, self._findings = file, rows, record, findings
        self._offsets = np.full(len(rows), -1, np.int64)
        self.suspects: list[int] = []
        self.num_lines = 0
        self._counts: Counter[str] = Counter()  # lines that are ok and failed
        self._last = -1
        self._first_other: int | None = None  # of the output's lines, that answers another row than the input has there
        self._errors: list[int] = []  # rows that failed while they ran
        self._named: set[int] = set()  # rows without a line, about which something was said
        digest, offset = OutputDigest(), 0
        file.seek(0)
        for raw in file:
            if raw.strip():
                self._read(raw, offset, digest)
                self.num_lines += 1
            offset += len(raw)
        missing = [index for index in np.flatnonzero(self._offsets < 0).tolist() if index not in self._named]
        for index in missing[:MAX_OF_A_KIND]:
            findings.add("missing", *self._missing(index))
        findings.counts["missing"] += len(missing[MAX_OF_A_KIND:])
        self._compare_report(digest.text)

    def require_readable(self, output: str) -> None:
        """Raises ValueError where no line has the form that a job writes."""
        if self._counts.total() or not (self.num_lines or len(self._rows)):
            return
        why = "it is empty"
        if self.num_lines:
            first = next(each.message for each in self._findings.kept if each.code == "unreadable")
            first = first.replace(" of the output", "", 1)
            why = first if self.num_lines == 1 else f"none of its {self.num_lines:,} lines is one, and {first}"
        raise ValueError(f"{output} is no output of ferrum-jax batch: {why}; name the job's output")

    def has(self, index: int) -> bool:
        return self._offsets[index] >= 0

    def line(self, index: int) -> Line:
        """The first line of a row that has one."""
        self._file.seek(int(self._offsets[index]))
        return line_in(self._file.readline())

    def _read(self, raw: bytes, offset: int, digest: OutputDigest) -> None:
        number = self.num_lines
        try:
            line = line_in(raw)
            digest.add(number, line.as_written)
        except ValueError as error:
            self._findings.add("unreadable", f"line {number + 1} of the output {_wrong_form(error)}")
            return
        self._counts["ok" if line.error is None else "failed"] += 1
        index = self._rows.find(line.id)
        if index != number and self._first_other is None:
            self._first_other = number
        if index is None:
            self._foreign(line, number)
        elif self.has(index):
            self._add("doubled", line, f"stands in the output twice, the second time in line {number + 1}")
        else:
            self._offsets[index] = offset
            if index < self._last:
                self._add("moved", line, f"stands in line {number + 1}, not in the order of the input")
            self._last = max(self._last, index)
            self._check(line, index)

    def _foreign(self, line: Line, number: int) -> None:
        custom_id = self._rows.read(number).custom_id if number < len(self._rows) else None
        if custom_id is not None and custom_id == line.custom_id:
            self._named.add(number)
            self._add(
                "request_changed",
                line,
                "was answered to another request than the input has now: its prompt or a parameter was edited there, "
                "or the id in the output",
            )
        else:
            self._add("foreign", line, f"in line {number + 1} answers a request that the input has not")

    def _check(self, line: Line, index: int) -> None:
        """Adds what is seen to be wrong with the line without answering again."""
        if self._rows.is_bad[index]:
            bad = self._rows.read(index)
            assert isinstance(bad, BadRow), f"row {index} was bad and is not"
            if line.as_written != failed_line(bad):
                self._add("error_changed", line, f"cannot be run ({bad.message}), and its line says something else")
            return
        if line.response is None:
            self._errors.append(index)
        why = self._wrong_error(line, index) if line.response is None else self._wrong_answer(line)
        if why is not None:
            self._add("line_changed", line, why)
            self.suspects.append(index)

    def _wrong_error(self, line: Line, index: int) -> str | None:
        if (custom_id := self._rows.read(index).custom_id) != line.custom_id:
            return f"has that custom_id, and the input has {custom_id!r}"
        error = line.error or {}
        fits = set(error) == {"code", "message"} and all(isinstance(value, str) for value in error.values())
        return None if fits else "has neither an answer nor an error with code and message"

    def _wrong_answer(self, line: Line) -> str | None:
        body, said = line.response.get("body"), line.response.get(RECORD)
        if line.error is not None or not isinstance(body, dict) or not isinstance(said, dict):
            return "has no answer with a record, or an answer and an error"
        if not line.is_intact:
            return "was edited: its digest is not that of what it says"
        own = {"created": self._job.created, "system_fingerprint": self._job.fingerprint}
        for name, value in own.items():
            if body.get(name, value) != value:
                return f"is of another job or model: {name} is {quoted(body[name])}, and the report says {value!r}"
        return None

    def _add(self, code: str, line: Line, what: str) -> None:
        self._findings.add(code, f"{quoted(line.custom_id)} {what}", line.custom_id)

    def _missing(self, index: int) -> tuple[str, str | None]:
        row = self._rows.read(index)
        name = row.name if isinstance(row, BadRow) else row.custom_id
        return f"{quoted(name)} has no line in the output", name

    def _first_changed(self) -> str:
        """Which line of the input is the first that the output, which is as it was written, does not answer."""
        index = self.num_lines if self._first_other is None else self._first_other
        if index >= len(self._rows):
            return "; the last of them are gone"
        return f"; line {self._rows.number(index):,} of it is the first that is another"

    def _compare_report(self, digest: str) -> None:
        job, add = self._job, self._findings.add
        if (len(self._rows), self._rows.layout) != (job.input["rows"], job.input["layout"]):
            count = f"it has {len(self._rows):,} rows, "
            count += "as it had then" if len(self._rows) == job.input["rows"] else f"and had {job.input['rows']:,}"
            first = self._first_changed() if digest == job.output else ""
            add("input_changed", f"the input is not the one that was answered: {count}{first}")
        if digest != job.output:
            add("output_changed", "the output as a whole has another digest than the report, so a line of it changed")
            self.suspects += [index for index in self._errors if index not in self.suspects]  # they have no digest
        for name in ("ok", "failed"):
            if (said := job.counts.get(name)) != (count := self._counts[name]):
                add("counts_differ", f"the output has {count:,} lines that are {name}, and the report {quoted(said)}")


def _wrong_form(error: ValueError) -> str:
    """Why a line cannot be read: an input line's error without its advice to the writer."""
    if not isinstance(error, LineError):
        return str(error)
    return "is not UTF-8" if error.code == "invalid_utf8" else f"is {error}"
