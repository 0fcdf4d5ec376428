"""A batch job: every line of an input file is answered by one line of an output file, in the same order.

Beside the output lies its journal, a folder `OUTPUT.journal`: the job's record, the segments that hold finished rows
and rows in progress, and the leases by which several workers share the job. The input is read once before the model
loads, so bad lines, changed rows and wrong paths are known at once. When all rows are finished one worker merges the
segments into the output. A job that is started again after an interruption goes on, and its output has the same bytes
as that of a job that was never interrupted.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.earlier.answers import EarlierAnswers, earlier_answers
from ferrum_jax.batch.input.files import reading_rows
from ferrum_jax.batch.input.rows import Rows, seldom_looking_for_cycles
from ferrum_jax.batch.job_paths import check_paths
from ferrum_jax.batch.journal.job_folder import JobFolder
from ferrum_jax.batch.journal.job_identity import REQUIRE_VALID, JobIdentity
from ferrum_jax.batch.journal.job_record import job_record, sealed
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.journal_file import file_of, object_in
from ferrum_jax.batch.journal.keeper import JobOptions, Keeper
from ferrum_jax.batch.journal.leases import LeaseLost, Leases
from ferrum_jax.batch.notice import EXIT_INTERRUPTED, EXIT_PREEMPTED, Notice, notice_of_signals
from ferrum_jax.batch.report.display import Display, Tally, summary_table
from ferrum_jax.batch.report.page import page
from ferrum_jax.batch.report.recorder import Recorder, report, run_in
from ferrum_jax.batch.timekeeper import Timekeeper
from ferrum_jax.batch.worker import Worker
from ferrum_jax.batch.worker_reports import WorkerReports
from ferrum_jax.io import system
from ferrum_jax.io.files.json_files import parse_json
from ferrum_jax.io.files.store import open_local, open_store, split
from ferrum_jax.io.paths import is_hub_id
from ferrum_jax.sampling_params import PACE

EXIT_OK, EXIT_ROWS_FAILED, EXIT_TOO_MANY_ERRORS = 0, 1, 3
_MAX_NAMED, _MAX_REPORTED = 5, 20  # rows that failed
_GOES_ON = "killed, or still at work"  # what the record of a run says until it has ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStart:
    """The job that a model is loaded for. A loader may call `identity.check` to learn early that the model is wrong."""

    rows: Rows
    identity: JobIdentity

    def commit_of(self, model: str, revision: str | None = None) -> str | None:
        """The commit of a hub's model to load, which is the one that the job began with; None for a path or URL.

        As in `LLM(model, revision=start.commit_of(model))`. Raises JobRefused where the job began with another model
        of the hub, or `revision` is another commit, and ValueError for one that cannot be found.
        """
        if revision is None and not is_hub_id(model):
            return None
        from checkpoints.hub import commit_of

        return self.identity.pin(model, revision, functools.partial(commit_of, model))


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The settings of a job that change its answers. A job goes on only with those that it was begun with.

    names: by which rows may name the model, beside its own and those of earlier starts; these may change. adapters:
    names of those that the model has, which rows may name; what they hold is part of its identity. seed: of the job; a
    row without a seed gets one from it. defaults: sampling fields, as a row has them, for rows that do not give them.
    require_valid: a row whose structure was cut off gets an error line. others: settings of the caller. now: gives the
    seconds since 1970; asked and recorded when the job begins.
    """

    names: Sequence[str] = ()
    adapters: Sequence[str] = ()
    seed: int = 0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    require_valid: bool = False
    others: Mapping[str, object] = dataclasses.field(default_factory=dict)
    now: Callable[[], float] = lambda: system.now()

    def recorded(self, model: str) -> dict[str, object]:
        """The settings as they stand in the job's record."""
        defaults = {name: value for name, value in self.defaults.items() if name not in PACE}
        own: dict[str, object] = {"defaults": defaults} if defaults else {}
        if self.require_valid:
            own[REQUIRE_VALID] = True
        if self.adapters:
            own["adapters"] = sorted(self.adapters)
        return {"model": model, "seed": self.seed, **own, **self.others}


def run_batch(
    make_llm: Callable[[JobStart], BatchLLM],
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    model: str,
    settings: JobSettings | None = None,
    options: JobOptions | None = None,
    console: Console,
    notice: Notice | None = None,
) -> int:
    """Runs the job and returns its exit code: 0 all rows succeeded, 1 some failed, 3 more than max_errors did,
    130 interrupted by the user, 75 by the system, because another worker took over its rows, or at the end of its time
    or budget. After 3, 130 and 75 the same command goes on. With `leaves_early` 0 and 1 may come before the output.

    make_llm: loads the model for the rows; called only if there is one to run. input_path, output_path: local paths
    or URLs. model: the name that answers carry. console: where progress and result are shown. notice: tells the job to
    stop; signals do so in any case. Writes OUTPUT.report.json: what depends on the run.
    Raises ValueError or OSError, before the model loads, for files that do not fit.
    """
    settings, options, notice = settings or JobSettings(), options or JobOptions(), notice or Notice()
    source, target = os.fspath(input_path), os.fspath(output_path)
    page_at = None if options.page_path is None else os.fspath(options.page_path)
    check_paths(source, target, page_at)
    with open_local(source) as raw, reading_rows(raw, source) as file, notice_of_signals(notice):
        try:
            place = JobFolder(target, options.open_store)
            recorded, pauses = settings.recorded(model), {"expiry_s": options.expiry_s, "poll_s": options.poll_s}
            begun = None if options.new_run else place.record_for(recorded, **pauses)
            known: Sequence[str] = () if begun is None else begun["names"]
            names = tuple(dict.fromkeys((model, *settings.names, *known)))
            if twice := sorted(set(names) & set(settings.adapters)):
                raise ValueError(
                    f"an adapter and the model are both called {twice[0]!r}; give the adapter another name"
                )
            how = {"defaults": settings.defaults, "adapters": settings.adapters, "in_turn": options.terms.has_end}
            rows = Rows(file, settings.seed, names, **how)
            if options.new_run:
                _set_aside(place, options, console)
            record = place.begin(recorded, names, settings.now())
            job = JobIdentity(place.journal, target, record, options, lambda text: _say(console, text))
            run = _Run(place, rows, job, options, notice, console)
            code = run.to_the_end(make_llm)
            run.report(page_at, source)
            return code
        except KeyboardInterrupt:
            _say(console, f"Finished rows are kept; {_same_command(options)} goes on with the rest.")
            return notice.exit_code or EXIT_INTERRUPTED
        except LeaseLost as error:  # the machine was halted, say: nobody did anything wrong
            _say(console, f"Stopped: {error}. Finished rows are kept; {_same_command(options)} goes on with the rest.")
            return EXIT_PREEMPTED


def _set_aside(place: JobFolder, options: JobOptions, console: Console) -> None:
    moved = place.set_aside(expiry_s=options.expiry_s, poll_s=options.poll_s)
    if moved is not None:
        _say(console, f"The earlier job is now {moved}.")


def _same_command(options: JobOptions) -> str:
    return "the same command without --new-run" if options.new_run else "the same command"


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=not console.is_terminal)


class _Run:
    """One start of a job by one worker."""

    def __init__(
        self, place: JobFolder, rows: Rows, job: JobIdentity, options: JobOptions, notice: Notice, console: Console
    ) -> None:
        self._place, self._rows, self._job, self._options = place, rows, job, options
        self._notice, self._console = notice, console
        self._worker = system.token_hex(8)
        self._journal = Journal(place.journal, rows, self._worker)
        self._journal.refresh()
        self._tally = Tally(
            num_rows=len(rows), num_ok=self._journal.num_ok, num_failed=rows.num_bad + self._journal.num_failed
        )
        self._recorder = Recorder(self._tally, keep=lambda stats: self._keep_run(stats, _GOES_ON))
        self._leases: Leases | None = None  # where rows are left to run
        self._earlier: EarlierAnswers | None = None  # that rows take
        self._time = Timekeeper(
            options.terms,
            rows=rows,
            journal=self._journal,
            reports=WorkerReports(place.journal, self._worker, lives=self._lives, least_s=options.share_s / 2),
            notice=notice,
            say=lambda text: _say(console, text),
        )
        self._has_left_early = self._has_loaded = self._is_written = False
        self._partial: str | None = None  # path of the lines of a job that was stopped in time

    def to_the_end(self, make_llm: Callable[[JobStart], BatchLLM]) -> int:
        """Runs and merges what is left; the exit code."""
        if self._journal.is_complete and len(self._rows.order):
            _say(
                self._console,
                f"All rows of {self._place.target} were answered before, so no model is loaded; --new-run answers them "
                "again.",
            )
        self._is_written = self._journal.is_complete and self._place.is_merged(self._rows.layout)
        if not self._is_written:
            leases = Leases(self._place.journal, self._worker, self._rows.part_layout, expiry_s=self._options.expiry_s)
            self._leases = leases
            try:
                if leases.claim_layout(self._options.poll_s, self._is_over):
                    self._share_job(leases, functools.partial(self._load, make_llm))
            finally:
                with contextlib.suppress(OSError):  # a full disk, say; others then see that the process has ended
                    leases.leave()
        return self._conclude()

    def _is_over(self) -> bool:
        """Whether this run is to end before its turn has come."""
        self._time.keep()
        return self._notice.is_given

    def _share_job(self, leases: Leases, make_llm: Callable[[], BatchLLM]) -> None:
        """Runs rows, and writes what the job has if this worker is the one to do so."""
        options = self._options
        with earlier_answers(options.reuse) as self._earlier, Keeper(self._journal, leases, options) as keeper:
            self._work(keeper, make_llm)
            if self._journal.is_complete:
                self._merge(leases)
            elif self._time.has_stopped:
                self._partial = self._place.merge_partial(self._rows, self._journal, leases)
                self._tally.num_ok = self._journal.num_ok
                self._tally.num_failed = self._rows.num_bad + self._journal.num_failed
            keeper.check()

    def _lives(self, worker: str) -> bool:
        """Whether another worker may still be at work."""
        return self._leases is not None and self._leases.lives(worker)

    def _load(self, make_llm: Callable[[JobStart], BatchLLM]) -> BatchLLM:
        """The model. Raises ValueError if the job was begun with another."""
        llm = make_llm(JobStart(rows=self._rows, identity=self._job))
        self._has_loaded = True
        self._job.begin(llm.identity)
        if self._earlier is not None:
            self._earlier.begin(self._job, llm.identity, self._options)
        self._rows.generation = self._job.generation
        return llm

    def _work(self, keeper: Keeper, make_llm: Callable[[], BatchLLM]) -> None:
        with self._rows.reading_ahead(), seldom_looking_for_cycles(), Display(self._console, self._tally) as display:
            self._time.start()
            worker = Worker(
                rows=self._rows,
                timekeeper=self._time,
                job=self._job,
                keeper=keeper,
                notice=self._notice,
                display=display,
                recorder=self._recorder,
                earlier=self._earlier,
            )
            try:
                with self._notice.orderly(True):
                    llm = worker.run(make_llm)
            finally:
                self._journal.flush()
            keeper.check()
            self._has_left_early = worker.has_left_early and not self._notice.is_given
            if llm is not None:
                self._time.end(self._tally)
                self._options.on_throughput(self._time.forecaster.report())
                why = self._notice.reason or ("others do the rest" if self._has_left_early else "all done")
                self._keep_run(llm.stats(), why)
                if self._notice.is_given:
                    self._notice.at_end(llm)

    def _keep_run(self, stats: Mapping[str, Any], why: str) -> None:
        """Writes the record of this run so far. why: it ended, or _GOES_ON."""
        record = self._recorder.run(self._worker, why, stats, journal_s=self._journal.busy_s)
        with contextlib.suppress(*((OSError,) if why == _GOES_ON else ())):
            self._place.journal.replace(f"runs/{self._worker}.json", file_of(record), lasts=why != _GOES_ON)

    def _merge(self, leases: Leases) -> None:
        """Returns once the output is written, by this worker or another."""
        while not self._place.is_merged(self._rows.layout):
            if leases.acquire("merge") is not None:
                try:
                    self._place.merge(self._rows, self._journal)
                except FileNotFoundError:
                    leases.beat()  # raises if another worker took this one for dead and deleted its file
                    raise
            else:
                system.sleep(self._options.poll_s)
        self._is_written = True

    def report(self, page_at: str | None, source: str) -> None:
        """Writes report.json beside the output, and the report's page if `page_at` says where. source: the input."""
        store = self._place.journal
        found = (run_in(object_in(store.read(f"runs/{name}"))) for name in store.names("runs"))
        runs = [run for run in found if run is not None]  # rows of one that is damaged count as unrecorded
        found = report(
            self._place.target,
            self._job.created,
            self._tally,
            runs,
            num_invalid=self._rows.num_bad,
            usage=self._journal.usage,
            errors=[] if self._notice.is_urgent else self._failures(_MAX_REPORTED),  # after a notice time is short
            torn_segments=self._journal.num_torn,
            rows_that_crashed_the_engine=len(self._journal.num_crashes),
            **self._time.report(self._partial),
            **self._job.report(self._journal.num_reused),
            record=job_record(self._place, self._rows, self._job, source, self._loading),
        )
        found = sealed(found)
        self._place.output.replace(f"{self._place.name}.report.json", json.dumps(found, indent=1).encode())
        if page_at is not None:
            folder, name = split(page_at)
            open_store(folder).replace(name, page(found).encode())

    @property
    def _loading(self) -> Mapping[str, Any]:
        """How the model was loaded; where none was now, as the earlier report has it."""
        if not self._has_loaded:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                before = parse_json(self._place.output.read(f"{self._place.name}.report.json") or b"")
                return {**self._options.loading, **before["record"]["loading"]}
        return self._options.loading

    def _conclude(self) -> int:
        self._console.print(summary_table(self._tally, self._place.target))
        if not self._notice.is_urgent:  # otherwise time is short
            self._name_failed()
        of_rows = EXIT_ROWS_FAILED if self._tally.num_failed else EXIT_OK
        too_many = f"more than {self._options.max_errors} rows failed"
        if self._is_written:
            if self._options.is_exceeded_by(self._tally.num_failed):
                self._console.print(f"All rows are done, and {too_many}.")
                return EXIT_TOO_MANY_ERRORS
            return of_rows
        if self._has_left_early:
            left = f"{self._tally.num_rows - self._tally.num_done:,}"
            _say(self._console, f"Ended early: other workers run the {left} rows that are left, and write the output.")
            return of_rows
        why = self._notice.reason or too_many
        more = self._time.more if self._notice.reason else " with a higher --max-errors"
        stopped = f"Stopped: {why}. Finished rows are kept; {_same_command(self._options)}{more} goes on with the rest."
        if self._partial is not None:
            stopped += f" {self._partial} has the lines of those that are done, in the order of the input."
        self._console.print(Text(stopped), soft_wrap=True)
        return self._notice.exit_code or EXIT_TOO_MANY_ERRORS

    def _name_failed(self) -> None:
        """Prints why the first few rows failed: a job that stops because of them has no output yet to look into."""
        found = self._failures(_MAX_NAMED)
        for error in found:
            whose = "" if error["is_invalid"] else f"{error['custom_id']!r}: "
            self._console.print(Text(f"{whose}{error['message']}"), soft_wrap=not self._console.is_terminal)
        if self._tally.num_failed > len(found) > 0:
            self._console.print(f"and {self._tally.num_failed - len(found):,} more")

    def _failures(self, most: int) -> list[dict[str, Any]]:
        """The first rows that failed: those that are invalid, then those that ran, in the order of the input."""
        invalid = (
            {"custom_id": bad.custom_id, "code": bad.code, "message": bad.message, "is_invalid": True}
            for _, bad in self._rows.bad_rows()
        )
        lines = self._journal.failed()
        ran = ({"custom_id": line["custom_id"], **line["error"], "is_invalid": False} for line in lines)
        return list(itertools.islice(itertools.chain(invalid, ran), most))
