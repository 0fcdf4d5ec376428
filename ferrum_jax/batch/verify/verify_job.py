"""A job's output verified: all its lines are read, and some rows are answered again by a job of their own.

That job is `run_batch` over the chosen rows alone, in a folder that is deleted, with the settings, names and start of
the first one. A line is a function of row, tokens and job, so in invariant mode it has the bytes of the line that was
written; where it has not, `line_difference` and `margins` say what is another, where and by how much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import math
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.input.files import check_name, reading_rows
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.input.sound_folder import rows_of_folder
from ferrum_jax.batch.job import EXIT_OK, EXIT_ROWS_FAILED, JobSettings, JobStart, run_batch
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.merge import merge
from ferrum_jax.batch.verify.counted_llm import counted
from ferrum_jax.batch.verify.findings import Findings
from ferrum_jax.batch.verify.line_difference import BITS, DIFFERENT, TEXT, TIE, Compared, compare
from ferrum_jax.batch.verify.margins import Parting, parting_of
from ferrum_jax.batch.verify.output_lines import Line, OutputLines, line_in
from ferrum_jax.batch.verify.promise import Promise, other_model, promise_of
from ferrum_jax.batch.verify.said import JobSaid, said_of
from ferrum_jax.core.progress import plain_console
from ferrum_jax.io.files.store import open_local, open_store, split

VERDICTS = (BITS, TEXT, TIE, DIFFERENT)
_MOST_SHOWN = 20  # rows that differ, which are looked into
_MOST_LOOKING_S = 8.0  # after a stop, when the process is soon killed
EXIT_DIFFERS = EXIT_ROWS_FAILED


class OtherModel(ValueError):
    """The model here is not the one that answered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """report_path, input_path: None are beside the output, and what the report names. sample: rows to answer again;
    None takes all. seed: of the choice of rows. margin: None takes what suits the dtypes."""

    report_path: str | None = None
    input_path: str | None = None
    sample: int | None = 100
    seed: int = 0
    margin: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowVerdict:
    """A row that was answered again and differs."""

    custom_id: str
    verdict: str
    compared: Compared
    parting: Parting | None = None


@dataclasses.dataclass(kw_only=True)
class Verified:
    """What was found. counts: of rows by verdict. differing: the first of those that differ. num_left: rows that were
    not answered again, because verifying was stopped."""

    output: str
    input: str
    num_lines: int
    findings: Findings
    promise: Promise | None = None
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    differing: list[RowVerdict] = dataclasses.field(default_factory=list)
    num_left: int = 0

    @property
    def num_answered(self) -> int:
        return self.counts.total()

    @property
    def is_right(self) -> bool:
        return not self.findings.counts.total() and not self.counts[DIFFERENT]


class VerifyStopped(Exception):
    """The rows were not all answered again. code: the exit code of the job that did it. found: until then."""

    def __init__(self, code: int, found: Verified) -> None:
        super().__init__(f"stopped with code {code}")
        self.code, self.found = code, found


def read_said(output: str, options: Options, findings: Findings) -> JobSaid:
    """What the report says. Raises ValueError where there is none that can be used."""
    path = options.report_path or f"{output}.report.json"
    folder, name = split(path)
    said = said_of(open_store(folder).read(name), path, findings)
    if said.output is None:
        raise ValueError(f"{path} knows no finished output: end the job first, or give its last report with --report")
    return said


def verify_job(
    make_llm: Callable[[JobStart, Callable[[Any], None]], BatchLLM],
    output: str,
    said: JobSaid,
    findings: Findings,
    options: Options,
    tell: Callable[[str], None] = lambda how_far: None,
) -> Verified:
    """make_llm: as of `run_batch`; called with a check, which it may give the model's identity as soon as it is known.

    said, findings: of `read_said`. tell: told how far it is. Raises VerifyStopped, and ValueError or OSError for files
    that cannot be read.
    """
    source = options.input_path or said.input_path
    check_name(output)
    with contextlib.ExitStack() as stack:
        rows = _rows_in(stack.enter_context(_opened(source)), said)
        tell("reading the output")
        lines = OutputLines(stack.enter_context(_opened(output)), rows, said, findings)
        if not lines.num_readable and (len(rows) or lines.num_lines):
            raise ValueError(f"{output} is no output of ferrum-jax batch: {lines.why_foreign}; name the job's output")
        found = Verified(output=output, input=source, num_lines=lines.num_lines, findings=findings)
        chosen = _chosen(rows, lines, options)
        if chosen:
            _Again(rows, lines, said, options, found, tell).answer(make_llm, chosen)
        return found


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Any]:
    if os.path.isdir(path):  # of sounds
        yield io.BytesIO(rows_of_folder(path))
        return
    with open_local(path) as raw, reading_rows(raw, path) as file:
        yield file


def _rows_in(file: Any, said: JobSaid) -> Rows:
    names = tuple(said.names) or (said.name,)
    return Rows(file, said.settings["seed"], names, defaults=said.defaults, adapters=said.adapters)


def _chosen(rows: Rows, lines: OutputLines, options: Options) -> list[int]:
    """The rows to answer again, in the order of the input: those found wrong, and others by chance.

    Rows that have an error line are among them, whatever it says: a forger could give every row one.
    """
    able = [index for index in rows.order.tolist() if lines.has(index)]
    count = len(able) if options.sample is None else min(options.sample, len(able))
    chosen = set(lines.suspects[:count])
    rest = [index for index in able if index not in chosen]
    chosen.update(random.Random(options.seed).sample(rest, max(count - len(chosen), 0)))
    return sorted(chosen)


class _Again:
    """The rows answered again, and compared."""

    def __init__(
        self,
        rows: Rows,
        lines: OutputLines,
        said: JobSaid,
        options: Options,
        found: Verified,
        tell: Callable[[str], None],
    ) -> None:
        self._rows, self._lines, self._said, self._options = rows, lines, said, options
        self._found, self._tell = found, tell
        self._llm: BatchLLM | None = None
        self._same_model = True
        self._looks_until_s = math.inf

    def answer(self, make_llm: Callable[[JobStart, Callable[[Any], None]], BatchLLM], chosen: Sequence[int]) -> None:
        def make(start: JobStart) -> BatchLLM:
            llm = make_llm(start, self._check)
            self._begin(llm)
            self._llm = llm
            return counted(llm, lambda count: self._tell(f"answered {count:,} of {len(chosen):,} rows again"))

        with tempfile.TemporaryDirectory(prefix="ferrum-jax-verify-") as folder:
            source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
            with open(source, "wb") as file:
                file.writelines(self._rows.line(index).rstrip(b"\r\n") + b"\n" for index in chosen)
            try:
                code = run_batch(
                    make,
                    source,
                    target,
                    model=self._said.name,
                    settings=self._settings(),
                    console=plain_console(quiet=True),
                )
            except OtherModel as error:
                self._found.findings.add("other_model", str(error))
                return
            if code in (EXIT_OK, EXIT_ROWS_FAILED):
                with open(target, "rb") as file:
                    self._compare(zip(chosen, map(line_in, file), strict=True))
                return
            self._looks_until_s = time.monotonic() + _MOST_LOOKING_S
            self._compare(self._answered(source, target))
            self._found.num_left = len(chosen) - self._found.num_answered
            raise VerifyStopped(code, self._found)

    def _answered(self, source: Path, target: Path) -> Iterator[tuple[int, Line]]:
        """(row, line) of those that a job which was stopped had answered."""
        store = open_store(f"{target}.journal")
        with _opened(str(source)) as file, open(target, "w+b") as lines:
            rows = _rows_in(file, self._said)
            journal = Journal(store, rows, "verify")
            journal.refresh()
            merge(rows, journal, store, lines)
            lines.seek(0)
            for line in map(line_in, lines):
                index = self._rows.find(line.id)
                assert index is not None, "the row was chosen"
                yield index, line

    def _settings(self) -> JobSettings:
        said = self._said
        return JobSettings(
            names=[name for name in said.names if name != said.name],
            adapters=said.adapters,
            seed=said.settings["seed"],
            defaults=said.defaults,
            require_valid=bool(said.settings.get("require_valid")),
            others=said.others,
            now=lambda: said.created,
        )

    def _check(self, identity: Any) -> None:
        """Raises OtherModel unless the model that answered is the one here."""
        if changes := other_model(self._said, identity):
            raise OtherModel(f"another model answered: {'; '.join(changes)}; name the one that did with --model")

    def _begin(self, llm: BatchLLM) -> None:
        identity = llm.identity
        assert identity is not None, "a model that is loaded is known"
        self._check(identity)
        self._same_model = identity.values() == dict(self._said.model or {})
        self._found.promise = promise_of(self._said, identity, self._options.margin)

    def _compare(self, pairs: Iterable[tuple[int, Line]]) -> None:
        for index, here in pairs:
            promise = self._found.promise
            assert promise is not None, "rows were answered"
            written = self._lines.line(index)
            compared = compare(written, here, bits=promise.bits, margin=promise.margin, same_model=self._same_model)
            verdict, parting = compared.verdict, None
            if verdict == DIFFERENT and len(self._found.differing) < _MOST_SHOWN:
                parting = self._parting(index, written, here)
                if compared.is_of_text and not promise.bits and parting is not None and parting.is_tie(promise.margin):
                    verdict = TIE
            self._found.counts[verdict] += 1
            if verdict in (TIE, DIFFERENT) and len(self._found.differing) < _MOST_SHOWN:
                name = self._rows.read(index).custom_id or ""
                self._found.differing.append(
                    RowVerdict(custom_id=name, verdict=verdict, compared=compared, parting=parting)
                )

    def _parting(self, index: int, written: Line, here: Line) -> Parting | None:
        if time.monotonic() > self._looks_until_s:
            return None
        row, llm = self._rows.read(index), self._llm
        assert isinstance(row, Row) and llm is not None, "the row was answered"
        now = datetime.datetime.fromtimestamp(self._said.created, datetime.UTC)
        return parting_of(llm, row, written, here, now)
