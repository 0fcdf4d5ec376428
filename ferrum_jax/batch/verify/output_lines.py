"""The lines of an output, read one after the other: each is compared with its row, its record and the report.

This needs no model, so it is done with every line. It finds lines that are gone, doubled, moved or foreign, requests
that are others than those of the input, and every answer that no longer has the digest it was written with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ferrum_jax.batch.input.formats import BadRow
from ferrum_jax.batch.input.lines import LineError, load_value
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.line_record import LINE, RECORD, OutputDigest, json_of, line_digest, line_of
from ferrum_jax.batch.journal.responses import failed_line
from ferrum_jax.batch.verify.findings import Findings
from ferrum_jax.batch.verify.said import JobSaid
from ferrum_jax.io.error_text import quoted

_ID = re.compile(r"batch_req_([0-9a-f]{32})")
_MOST_NAMED = 5


class Line(NamedTuple):
    """A line of an output. response, error: objects as they were read, None where there is none."""

    id: str  # 32 hex digits
    custom_id: str | None
    response: Any
    error: Any

    @property
    def as_json(self) -> dict[str, Any]:
        return {"custom_id": self.custom_id, "response": self.response, "error": self.error}

    @property
    def as_written(self) -> bytes:
        """The bytes of the line as a job writes it."""
        texts = ["null" if each is None else json_of(each) for each in (self.response, self.error)]
        return line_of(self.id, self.custom_id, *texts)


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
    response, error = (_object(value.get(name), name) for name in ("response", "error"))
    return Line(id[1], custom_id, response, error)


def _object(value: Any, name: str) -> Any:
    """value: of a file with columns, JSON as text."""
    found = load_value(value.encode()) if isinstance(value, str) else value
    if not isinstance(found, dict | None):
        raise ValueError(f"has a {name} that is {quoted(found)}, and must have an object or null")
    return found


class OutputLines:
    """The lines of an output and what was found of them.

    suspects: rows whose line was found wrong and can be compared with what is answered again.
    """

    def __init__(self, file: BinaryIO, rows: Rows, said: JobSaid, findings: Findings) -> None:
        """file: JSON lines, to read and to seek in."""
        self._file, self._rows, self._said, self._findings = file, rows, said, findings
        self._offsets = np.full(len(rows), -1, np.int64)
        self.suspects: list[int] = []
        self.num_lines = self.num_ok = self.num_failed = 0
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
        self._name_missing()
        self._compare_report(digest)

    @property
    def num_readable(self) -> int:
        """Lines of the form that a job writes."""
        return self.num_ok + self.num_failed

    @property
    def why_foreign(self) -> str:
        """How it is seen where no line is readable."""
        if not self.num_lines:
            return "it is empty"
        first = next(each.message for each in self._findings.kept if each.code == "unreadable")
        first = first.replace(" of the output", "", 1)
        return first if self.num_lines == 1 else f"none of its {self.num_lines:,} lines is one, and {first}"

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
        self.num_ok, self.num_failed = self.num_ok + (line.error is None), self.num_failed + (line.error is not None)
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
        """What the line says, without answering again."""
        if self._rows.is_bad[index]:
            bad = self._rows.read(index)
            assert isinstance(bad, BadRow), f"row {index} was bad and is not"
            if line.as_written != failed_line(bad):
                self._add("error_changed", line, f"cannot be run ({bad.message}), and its line says something else")
            return
        why = _wrong_error(line) if line.response is None else self._wrong_answer(line)
        if line.response is None:
            self._errors.append(index)
        if line.response is None and line.custom_id != (custom_id := self._rows.read(index).custom_id):
            why = f"has that custom_id, and the input has {custom_id!r}"
        if why is not None:
            self._add("line_changed", line, why)
            self.suspects.append(index)

    def _wrong_answer(self, line: Line) -> str | None:
        response, said = line.response, self._said
        body, record = response.get("body"), response.get(RECORD)
        if line.error is not None or not isinstance(body, dict):
            return "has no answer, or an answer and an error"
        if not isinstance(record, dict) or LINE not in record:
            return "has no record beside its answer, which says what was written"
        others = {name: value for name, value in record.items() if name != LINE}
        if line_digest(line.id, line.custom_id, json_of(body), others) != record[LINE]:
            return "was edited: its digest is not that of what it says"
        expected = {"status_code": 200, "request_id": f"req_{line.id}"}
        if {name: value for name, value in response.items() if name not in ("body", RECORD)} != expected:
            return f"has fields beside its answer that are not {json.dumps(expected)}"
        own = {"created": said.created, "system_fingerprint": said.fingerprint}
        differing = [name for name, value in own.items() if name in body and body[name] != value]
        if differing:
            name = differing[0]
            return f"is of another job or model: {name} is {quoted(body[name])}, and the report says {own[name]!r}"
        return None

    def _add(self, code: str, line: Line, what: str) -> None:
        self._findings.add(code, f"{quoted(line.custom_id)} {what}", line.custom_id)

    def _name_missing(self) -> None:
        missing = [index for index in np.flatnonzero(self._offsets < 0).tolist() if index not in self._named]
        for index in missing[:_MOST_NAMED]:
            row = self._rows.read(index)
            name = row.name if isinstance(row, BadRow) else row.custom_id
            self._findings.add("missing", f"{quoted(name)} has no line in the output", name)
        self._findings.counts["missing"] += max(len(missing) - _MOST_NAMED, 0)

    def _first_changed(self) -> str:
        """Which line of the input is the first that the output, which is as it was written, does not answer."""
        index = self.num_lines if self._first_other is None else self._first_other
        if index >= len(self._rows):
            return "; the last of them are gone"
        return f"; line {self._rows.number(index):,} of it is the first that is another"

    def _compare_report(self, digest: OutputDigest) -> None:
        said, add = self._said, self._findings.add
        if (len(self._rows), self._rows.layout) != (said.rows, said.layout):
            count = f"it has {len(self._rows):,} rows, "
            count += "as it had then" if len(self._rows) == said.rows else f"and had {said.rows:,}"
            first = self._first_changed() if digest.text == said.output else ""
            add("input_changed", f"the input is not the one that was answered: {count}{first}")
        if digest.text != said.output:
            add("output_changed", "the output as a whole has another digest than the report, so a line of it changed")
            self.suspects += [index for index in self._errors if index not in self.suspects]  # they have no digest
        counts: Mapping[str, int] = {"ok": self.num_ok, "failed": self.num_failed}
        for name, count in counts.items():
            if said.counts.get(name) != count:
                add(
                    "counts_differ",
                    f"the output has {count:,} lines that are {name}, and the report {quoted(said.counts.get(name))}",
                )


def _wrong_form(error: ValueError) -> str:
    """What a line is that cannot be read; without what its writer is to do, as a line of an input says it."""
    if not isinstance(error, LineError):
        return str(error)
    return "is not UTF-8" if error.code == "invalid_utf8" else f"is {error}"


def _wrong_error(line: Line) -> str | None:
    error = line.error
    fits = error is not None and set(error) == {"code", "message"} and all(isinstance(v, str) for v in error.values())
    return None if fits else "has neither an answer nor an error with code and message"
