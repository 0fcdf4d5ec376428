"""A job's output verified: all its lines are read, and some rows are answered again by a job of their own.

That job is `run_batch` over the chosen rows alone, in a folder that is deleted, with the settings, names and start of
the first one. A line is a function of row, tokens and job, so in invariant mode it has the bytes of the line that was
written; where it has not, `line_difference` and `margins` say what is another, where and by how much.
"""

import contextlib
import dataclasses
import datetime
import io
import math
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.input.files import check_name, reading_rows
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.input.sound_folder import rows_of_folder
from ferrum_jax.batch.job import EXIT_OK, EXIT_ROWS_FAILED, JobOptions, JobSettings, JobStart, run_batch
from ferrum_jax.batch.journal.job_record import JobRecord
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.merge import merge
from ferrum_jax.batch.verify.findings import Findings
from ferrum_jax.batch.verify.line_difference import BITS, DIFFERENT, TEXT, TIE, Compared, compare
from ferrum_jax.batch.verify.margins import Parting, parting_of
from ferrum_jax.batch.verify.output_lines import Line, OutputLines, line_in
from ferrum_jax.batch.verify.promise import Promise, other_model, promise_of
from ferrum_jax.core.progress import plain_console
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_local, open_store

VERDICTS = (BITS, TEXT, TIE, DIFFERENT)
EXIT_DIFFERS = EXIT_ROWS_FAILED
_MAX_SHOWN = 20  # rows that differ, whose first other token is looked for
_MAX_MARGINS_S = 8.0  # of that after a stop, when the process is soon killed

MakeLLM = Callable[[JobStart, Callable[[Any], None]], BatchLLM]


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
    """The findings. counts: of rows by verdict. differing: the first differing rows. num_left: rows that were
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


def verify_job(
    make_llm: MakeLLM, output: str, record: JobRecord, options: Options, tell: Callable[[str], None] = lambda text: None
) -> Verified:
    """make_llm: as of `run_batch`; called with a check, which it may give the model's identity as soon as it is known.

    record: of `record_of`. tell: told how far it is. Raises VerifyStopped, and ValueError or OSError for files that
    cannot be read.
    """
    source, findings = options.input_path or record.input["path"], Findings()
    check_name(output)
    for change in record.changes:
        findings.add("report_changed", change)
    with contextlib.ExitStack() as stack:
        rows = rows_in(stack.enter_context(opened_rows(source)), record)
        tell("reading the output")
        lines = OutputLines(stack.enter_context(opened_rows(output)), rows, record, findings)
        lines.require_readable(output)
        found = Verified(output=output, input=source, num_lines=lines.num_lines, findings=findings)
        if chosen := _chosen(rows, lines, options):
            _Again(rows, lines, record, options, found).answer(make_llm, chosen, tell)
        return found


@contextlib.contextmanager
def opened_rows(path: str) -> Iterator[Any]:
    """The rows of a file, or of a folder of sounds, as JSON lines."""
    if os.path.isdir(path):  # of sounds
        yield io.BytesIO(rows_of_folder(path))
        return
    with open_local(path) as raw, reading_rows(raw, path) as file:
        yield file


def rows_in(file: Any, record: JobRecord) -> Rows:
    """Rows as the job of this record read them."""
    names = tuple(record.names) or (record.name,)
    return Rows(file, record.settings["seed"], names, defaults=record.defaults, adapters=record.adapters)


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

    def __init__(self, rows: Rows, lines: OutputLines, record: JobRecord, options: Options, found: Verified) -> None:
        self._rows, self._lines, self._record, self._options, self._found = rows, lines, record, options, found
        self._llm: BatchLLM | None = None
        self._same_model = True
        self._margins_until_s = math.inf

    def answer(self, make_llm: MakeLLM, chosen: Sequence[int], tell: Callable[[str], None]) -> None:
        def on_progress(num_ok: int, num_failed: int) -> None:
            tell(f"answered {num_ok + num_failed:,} of {len(chosen):,} rows again")

        record = self._record
        settings = JobSettings(
            names=[name for name in record.names if name != record.name],
            adapters=record.adapters,
            seed=record.settings["seed"],
            defaults=record.defaults,
            others=record.settings,
            now=lambda: record.created,
        )
        with tempfile.TemporaryDirectory(prefix="ferrum-jax-verify-") as folder:
            source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
            with open(source, "wb") as file:
                file.writelines(self._rows.line(index).rstrip(b"\r\n") + b"\n" for index in chosen)
            try:
                code = run_batch(
                    lambda start: self._load(make_llm, start),
                    source,
                    target,
                    model=record.name,
                    settings=settings,
                    options=JobOptions(on_progress=on_progress),
                    console=plain_console(quiet=True),
                )
            except OtherModel as error:
                self._found.findings.add("other_model", str(error))
                return
            is_stopped = code not in (EXIT_OK, EXIT_ROWS_FAILED)
            if is_stopped:
                self._margins_until_s = system.monotonic() + _MAX_MARGINS_S
            self._compare(source, target)
        if is_stopped:
            self._found.num_left = len(chosen) - self._found.num_answered
            raise VerifyStopped(code, self._found)

    def _load(self, make_llm: MakeLLM, start: JobStart) -> BatchLLM:
        self._llm = llm = make_llm(start, self._check)
        identity = llm.identity
        assert identity is not None, "a model that is loaded is known"
        self._check(identity)
        self._same_model = identity.values() == dict(self._record.model or {})
        self._found.promise = promise_of(self._record, identity, self._options.margin)
        return llm

    def _check(self, identity: Any) -> None:
        """Raises OtherModel unless the model that answered is the one here."""
        if changes := other_model(self._record, identity):
            raise OtherModel(f"another model answered: {'; '.join(changes)}; name the one that did with --model")

    def _compare(self, source: Path, target: Path) -> None:
        """Compares the lines that the job of the chosen rows has; a job that was stopped has written no output."""
        with opened_rows(str(source)) as file, open(target, "w+b") as lines:
            rows = rows_in(file, self._record)
            journal = Journal(open_store(f"{target}.journal"), rows, "verify")
            journal.refresh()
            merge(rows, journal, lines)
            lines.seek(0)
            for here in map(line_in, lines):
                index, promise = self._rows.find(here.id), self._found.promise
                assert index is not None and promise is not None, "the row was chosen, and answered"
                self._compare_row(index, here, promise)

    def _compare_row(self, index: int, here: Line, promise: Promise) -> None:
        written, found = self._lines.line(index), self._found
        compared = compare(written, here, bits=promise.bits, margin=promise.margin, same_model=self._same_model)
        verdict, parting = compared.verdict, None
        if verdict == DIFFERENT and len(found.differing) < _MAX_SHOWN:
            row, llm = self._rows.read(index), self._llm
            assert isinstance(row, Row) and llm is not None, "the row was answered"
            if system.monotonic() < self._margins_until_s:
                now = datetime.datetime.fromtimestamp(self._record.created, datetime.UTC)
                parting = parting_of(llm, row, written, here, now)
            if compared.is_of_text and not promise.bits and parting is not None and parting.is_tie(promise.margin):
                verdict = TIE
            found.differing.append(
                RowVerdict(custom_id=row.custom_id or "", verdict=verdict, compared=compared, parting=parting)
            )
        found.counts[verdict] += 1
