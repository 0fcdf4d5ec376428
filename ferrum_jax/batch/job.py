"""A batch job: every line of an input file is answered by one line of an output file.

The input is scanned before the model loads: bad lines, duplicates and rows that are already answered are
known by then, and a wrong path or a changed row stops the job at once. Rows are then read again as the
engine asks for them, and answers are appended in the order in which rows finish. Started again after any
interruption, the job goes on with the rows that have no line yet.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

from rich.console import Console

from ferrum_jax.batch.display import Display, Tally, summary_table
from ferrum_jax.batch.formats import BadRow, Row, duplicate_row, parse_line
from ferrum_jax.batch.journal import Finished, Journal
from ferrum_jax.batch.responses import JobIdentity, completed_line, failed_line
from ferrum_jax.prompt import Prompt
from ferrum_jax.request import RequestOutput, SamplingParams

EXIT_OK, EXIT_ROWS_FAILED, EXIT_INTERRUPTED = 0, 1, 130
_MAX_NAMED = 5  # rows named in one message


class BatchLLM(Protocol):
    """What a job asks of an engine: `ferrum_jax.LLM`, or a fake one in tests. Closing the generator aborts the rest."""

    def as_completed(
        self, requests: Iterable[tuple[str, Prompt, SamplingParams]]
    ) -> Generator[tuple[str, RequestOutput | ValueError], None, None]: ...


@dataclasses.dataclass(kw_only=True, slots=True)
class Scan:
    """What one pass over the input found: the rows to run, by place, and the bad lines to write."""

    num_rows: int = 0
    offsets: array.array = dataclasses.field(default_factory=lambda: array.array("Q"))  # bytes, of rows to run
    line_numbers: array.array = dataclasses.field(default_factory=lambda: array.array("Q"))
    bad: list[BadRow] = dataclasses.field(default_factory=list)


def run_batch(
    make_llm: Callable[[], BatchLLM],
    input_path: Path,
    output_path: Path,
    *,
    model: str,
    seed: int = 0,
    settings: Mapping[str, object] | None = None,
    console: Console,
    now: Callable[[], float] = time.time,
) -> int:
    """Runs the job and returns its exit code: 0 all rows succeeded, 1 some failed, 130 interrupted.

    make_llm: loads the model; called only if there is a row to run. model: the name that answers carry.
    seed: from which rows without a seed get one. settings: what else changes answers; a job cannot go on
    with others. console: where progress and result are shown. now: seconds since 1970.
    Raises ValueError or OSError, before the model loads, for files that do not fit.
    """
    if output_path.exists() and input_path.exists() and output_path.samefile(input_path):
        raise ValueError(f"input and output are both {output_path}; name another output")
    with open(input_path, "rb") as file, contextlib.closing(Journal(output_path)) as journal:
        done = journal.finished
        job = _identity(done, output_path, model, {"model": model, "seed": seed, **(settings or {})}, now)
        scan = scan_input(file, done, seed)
        tally = Tally(num_rows=scan.num_rows, num_ok=len(done.ids) - done.num_failed, num_failed=done.num_failed)
        try:
            for bad in scan.bad:
                journal.append(failed_line(bad))
                tally.num_failed += 1
            if scan.offsets:
                _run_rows(make_llm, _rows(file, scan, seed), journal, job, tally, console)
        except KeyboardInterrupt:
            journal.close()
            console.print(summary_table(tally, f"{output_path}: interrupted"))
            console.print("Finished rows are kept; the same command goes on with the rest.")
            return EXIT_INTERRUPTED
    console.print(summary_table(tally, str(output_path)))
    return EXIT_ROWS_FAILED if tally.num_failed else EXIT_OK


def scan_input(lines: Iterable[bytes], done: Finished, seed: int) -> Scan:
    """What is to be done for these lines, given what is done. Raises ValueError if the two do not fit."""
    scan = Scan()
    first_lines: dict[str, int] = {}
    changed: list[str] = []
    num_found, offset = 0, 0
    for number, raw in enumerate(lines, start=1):
        place, offset = offset, offset + len(raw)
        if not raw.strip():
            continue
        scan.num_rows += 1
        row = parse_line(raw, number, seed=seed)
        if row.custom_id is not None and row.custom_id in first_lines:
            row = duplicate_row(raw, number, row.custom_id, first_lines[row.custom_id])
        if row.custom_id is not None:
            first_lines[row.custom_id] = number
            if done.id_of.get(row.custom_id, row.id) != row.id:
                changed.append(f"{row.custom_id!r} (line {number})")
        if row.id in done.ids:
            num_found += 1
        elif isinstance(row, BadRow):
            scan.bad.append(row)
        else:
            scan.offsets.append(place)
            scan.line_numbers.append(number)
    _check_same_rows(changed, len(done.ids) - num_found)
    return scan


def _check_same_rows(changed: list[str], num_strange: int) -> None:
    if changed:
        more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        named = ", ".join(changed[:_MAX_NAMED]) + more
        raise ValueError(
            f"the output holds answers to other content of rows {named}; "
            "give changed rows another custom_id, or name another output"
        )
    if num_strange:
        raise ValueError(
            f"the output holds answers to rows that are not in the input (lines: {num_strange}); "
            "give the input that the job was begun with, or name another output"
        )


def _identity(
    done: Finished, output_path: Path, model: str, settings: Mapping[str, object], now: Callable[[], float]
) -> JobIdentity:
    content = json.dumps(settings, sort_keys=True).encode()
    fingerprint = f"fp_{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    if done.fingerprint not in (None, fingerprint):
        raise ValueError(
            f"{output_path} was begun with other settings, now {dict(settings)}; "
            "go on with those of the first start, or name another output"
        )
    created = int(now()) if done.created is None else done.created
    return JobIdentity(model=model, created=created, fingerprint=fingerprint)


def _rows(file: BinaryIO, scan: Scan, seed: int) -> Iterator[Row]:
    """The rows to run, read again one at a time as they are asked for."""
    for offset, number in zip(scan.offsets, scan.line_numbers, strict=True):
        file.seek(offset)
        row = parse_line(file.readline(), number, seed=seed)
        if not isinstance(row, Row):
            raise OSError(f"line {number} of the input changed while the job ran; start the job again")
        yield row


def _run_rows(
    make_llm: Callable[[], BatchLLM],
    rows: Iterator[Row],
    journal: Journal,
    job: JobIdentity,
    tally: Tally,
    console: Console,
) -> None:
    """Runs the rows and appends each one's line as it finishes."""
    running: dict[str, Row] = {}

    def requests() -> Iterator[tuple[str, Prompt, SamplingParams]]:
        for row in rows:
            running[row.custom_id] = row
            yield row.custom_id, row.prompt, row.params

    llm = make_llm()
    tally.started_s = time.monotonic()
    with contextlib.closing(llm.as_completed(requests())) as finished, Display(console, tally) as display:
        for custom_id, output in finished:
            row = running.pop(custom_id)
            if isinstance(output, ValueError):
                bad = BadRow(id=row.id, custom_id=row.custom_id, code="invalid_request", message=str(output))
                journal.append(failed_line(bad))
                tally.num_failed += 1
            else:
                journal.append(completed_line(row, output, job))
                tally.count(output)
            display.update()
    assert not running, f"rows {list(running)[:_MAX_NAMED]} were not answered"
