"""A batch job: every line of an input file is answered by one line of an output file, in the same order.

Beside the output lies its journal, a folder `OUTPUT.journal`: the job's record, the segments that hold finished rows
and rows in progress, and the leases by which several workers share the job. The input is read once before the model
loads, so bad lines, changed rows and wrong paths are known at once. When all rows are finished one worker merges the
segments into the output. Started again after any interruption the job goes on, and the output has the same bytes as
that of a job that was never interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ferrum_jax.batch.display import Display, Tally, summary_table
from ferrum_jax.batch.files import check_name, reading_rows
from ferrum_jax.batch.journal import Journal
from ferrum_jax.batch.keeper import JobOptions, Keeper
from ferrum_jax.batch.leases import Leases
from ferrum_jax.batch.llm import BatchLLM
from ferrum_jax.batch.notice import EXIT_INTERRUPTED, EXIT_PREEMPTED, Notice, notice_of_signals
from ferrum_jax.batch.page import page
from ferrum_jax.batch.place import Place
from ferrum_jax.batch.record import Recorder, report
from ferrum_jax.batch.responses import JobIdentity
from ferrum_jax.batch.rows import Rows
from ferrum_jax.batch.store import Store, is_url, open_local, open_store, split
from ferrum_jax.batch.worker import Worker
from ferrum_jax.paths import require_folder_of

EXIT_OK, EXIT_ROWS_FAILED, EXIT_TOO_MANY_ERRORS = 0, 1, 3
__all__ = [
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_PREEMPTED",
    "EXIT_ROWS_FAILED",
    "EXIT_TOO_MANY_ERRORS",
    "BatchLLM",
    "JobOptions",
    "run_batch",
]


_MOST_NAMED = 5  # rows that failed
_OBJECTS_BETWEEN_LOOKS = 50_000  # Python's own is 700: a look every third row


@contextlib.contextmanager
def _seldom_looking_for_cycles() -> Iterator[None]:
    """Rows are objects by the hundred and no cycles: to look for these again and again costs 5 % of the host's time."""
    before = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_LOOKS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run_batch(
    make_llm: Callable[[Rows], BatchLLM],
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    model: str,
    seed: int = 0,
    settings: Mapping[str, object] | None = None,
    options: JobOptions | None = None,
    console: Console,
    notice: Notice | None = None,
    at_notice: Callable[[BatchLLM], None] = lambda llm: None,
    now: Callable[[], float] = time.time,
    open_store: Callable[[str], Store] = open_store,
    page_path: str | os.PathLike[str] | None = None,
) -> int:
    """Runs the job and returns its exit code: 0 all rows succeeded, 1 some failed, 3 more than max_errors did,
    130 interrupted by the user, 75 by the system. After 3, 130 and 75 the same command goes on.

    make_llm: loads the model for the rows; called only if there is one to run. input_path, output_path: local paths
    or URLs. model: the name that answers carry. seed: from which rows without a seed get one. settings: what else
    changes answers; a job cannot go on with others. console: where progress and result are shown. notice: tells the
    job to stop; signals do so in any case. at_notice: called with the engine when the job stops for a notice, once all
    rows are journaled. now: seconds since 1970. open_store: the store of a folder. page_path: path or URL of an
    HTML report. Writes OUTPUT.report.json: what depends on the run.
    Raises ValueError or OSError, before the model loads, for files that do not fit.
    """
    source, target = os.fspath(input_path), os.fspath(output_path)
    page_at = None if page_path is None else os.fspath(page_path)
    _check_paths(source, target, page_at)
    notice = notice or Notice()
    with open_local(source) as raw, reading_rows(raw, source) as file, notice_of_signals(notice):
        try:
            place = Place(target, open_store)
            rows = Rows(file, seed)
            job = place.identity({"model": model, "seed": seed, **(settings or {})}, model, now)
            run = _Run(place, rows, job, options or JobOptions(), notice, console)
            code = run.to_the_end(functools.partial(make_llm, rows), at_notice)
            run.report(page_at)
            return code
        except KeyboardInterrupt:
            console.print("Finished rows are kept; the same command goes on with the rest.")
            return notice.exit_code or EXIT_INTERRUPTED


def _check_paths(source: str, target: str, page_at: str | None) -> None:
    check_name(target)
    if source == target or (
        not is_url(source) and not is_url(target) and Path(target).exists() and os.path.samefile(source, target)
    ):
        raise ValueError(f"input and output are both {target}; name another output")
    if page_at is not None and is_url(page_at):
        open_store(split(page_at)[0])  # so that a driver that is not installed is known now
    elif page_at is not None:
        require_folder_of(page_at, "report's page")
    if is_url(target):
        return
    path = Path(target)
    if path.exists() and not path.is_file():
        raise ValueError(f"{target} is not a file; name a file for the output")
    require_folder_of(path, "output")


class _Run:
    """One start of a job by one worker."""

    def __init__(
        self, place: Place, rows: Rows, job: JobIdentity, options: JobOptions, notice: Notice, console: Console
    ) -> None:
        self._place, self._rows, self._job, self._options = place, rows, job, options
        self._notice, self._console = notice, console
        self._worker = secrets.token_hex(8)
        self._journal = Journal(place.journal, rows, self._worker)
        self._journal.refresh()
        self._tally = Tally(
            num_rows=len(rows), num_ok=self._journal.num_ok, num_failed=rows.num_bad + self._journal.num_failed
        )
        self._recorder = Recorder(self._tally)

    def to_the_end(self, make_llm: Callable[[], BatchLLM], at_notice: Callable[[BatchLLM], None]) -> int:
        """Runs and merges what is left; the exit code."""
        if not (self._journal.is_complete and self._place.is_merged(self._rows.layout)):
            leases = Leases(self._place.journal, self._worker, self._rows.layout, expiry_s=self._options.expiry_s)
            try:
                with Keeper(self._journal, leases, self._options) as keeper:
                    self._work(leases, keeper, make_llm, at_notice)
                    if self._journal.is_complete:
                        self._merge(leases)
                    keeper.check()
            finally:
                with contextlib.suppress(OSError):  # a full disk, say; the leases end with the process then
                    leases.leave()
        return self._conclude()

    def _work(
        self,
        leases: Leases,
        keeper: Keeper,
        make_llm: Callable[[], BatchLLM],
        at_notice: Callable[[BatchLLM], None],
    ) -> None:
        with self._rows.reading_ahead(), _seldom_looking_for_cycles(), Display(self._console, self._tally) as display:
            worker = Worker(
                rows=self._rows,
                journal=self._journal,
                leases=leases,
                job=self._job,
                options=self._options,
                notice=self._notice,
                tally=self._tally,
                display=display,
                recorder=self._recorder,
                check=keeper.check,
            )
            self._notice.is_orderly = True
            try:
                llm = worker.run(make_llm)
            finally:
                self._notice.is_orderly = False
                self._journal.flush()
            keeper.check()
            if llm is not None:
                why = self._notice.reason or "all done"
                record = self._recorder.run(self._worker, why, llm.stats(), journal_s=self._journal.busy_s)
                self._place.journal.replace(f"runs/{self._worker}.json", json.dumps(record).encode())
                if self._notice.is_given:
                    at_notice(llm)

    def _merge(self, leases: Leases) -> None:
        """The output is there when this returns, be it by this worker or another."""
        while not self._place.is_merged(self._rows.layout):
            if leases.acquire("merge") is not None:
                try:
                    self._place.merge(self._rows, self._journal)
                except FileNotFoundError:
                    leases.beat()  # another worker took this one for dead and cleared its file away, perhaps
                    raise
            else:
                time.sleep(self._options.poll_s)

    def report(self, page_at: str | None) -> None:
        """Writes report.json beside the output, and the page of it if that has a path or URL."""
        store = self._place.journal
        contents = [store.read(f"runs/{name}") for name in store.names("runs")]
        runs = [json.loads(content) for content in contents if content is not None]
        found = report(
            self._place.target,
            self._job.created,
            self._tally,
            runs,
            torn_segments=self._journal.num_torn,
            rows_that_crashed_the_engine=len(self._journal.num_crashes),
        )
        self._place.output.replace(f"{self._place.name}.report.json", json.dumps(found, indent=1).encode())
        if page_at is not None:
            folder, name = split(page_at)
            open_store(folder).replace(name, page(found).encode())

    def _conclude(self) -> int:
        self._console.print(summary_table(self._tally, self._place.target))
        if not self._notice.is_given:  # there is no time for it then
            self._name_failed()
        too_many = f"more than {self._options.max_errors} rows failed"
        if self._journal.is_complete:
            if self._options.is_exceeded_by(self._tally.num_failed):
                self._console.print(f"All rows are done, and {too_many}.")
                return EXIT_TOO_MANY_ERRORS
            return EXIT_ROWS_FAILED if self._tally.num_failed else EXIT_OK
        why = self._notice.reason or too_many
        command = "the same command" if self._notice.reason else "the same command with a higher --max-errors"
        self._console.print(f"Stopped: {why}. Finished rows are kept; {command} goes on with the rest.", soft_wrap=True)
        return self._notice.exit_code or EXIT_TOO_MANY_ERRORS

    def _name_failed(self) -> None:
        """Says why rows failed, of the first few: a job that stops for them has no output yet to look into."""
        found = [bad.message for _, bad in itertools.islice(self._rows.bad_rows(), _MOST_NAMED)]
        journaled = itertools.islice(self._journal.failed(), _MOST_NAMED - len(found))
        found += [f"{line['custom_id']!r}: {line['error']['message']}" for line in journaled]
        for reason in found:
            self._console.print(Text(reason), soft_wrap=not self._console.is_terminal)
        if self._tally.num_failed > len(found) > 0:
            self._console.print(f"and {self._tally.num_failed - len(found):,} more")
