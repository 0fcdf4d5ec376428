"""The keeper: the thread that makes a worker's journal durable and says that the worker lives; and a run's options."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.deadline.end_terms import EndTerms
from ferrum_jax.batch.deadline.forecaster import WorkerReport
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.io import system
from ferrum_jax.io.files.store import Store, open_store
from ferrum_jax.io.old_names import FIELDS, warn_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options that a run may choose without changing an answer.

    max_errors: the job stops once more rows than this have failed; None never stops for it. flush_s: between two
    segments of the journal. partials_s: between two records of rows in progress. expiry_s: how long a worker may be
    silent before others take it for dead. poll_s: between two looks at what other workers have left. share_s: what
    workers give one another takes as long at least. leaves_early: end, with the code of a job that is done, once other
    workers run all rows that are left. new_run: begin anew, and move the job
    that is there aside. strict_bits: refuse to go on where equal bits are not promised.
    reuse: earlier outputs, whose answers rows take that ask the same. reuse_text: of other modes and environments too.
    page_path: path or URL of an HTML report. loading: how the command loads the model, and its input where that is
    not the file of rows; as JSON, for the report's record. terms: of the run's end and its cost. on_throughput: told at
    the end what the worker measured of itself. on_progress: told now and then how many rows were answered and how many
    failed, of the whole job. open_store: the store of a folder. on_pace: the old name of on_throughput.
    """

    max_errors: int | None = None
    flush_s: float = 2.0
    partials_s: float = 60.0
    expiry_s: float = 60.0
    poll_s: float = 1.0
    share_s: float = 2.0
    leaves_early: bool = False
    new_run: bool = False
    strict_bits: bool = False
    reuse: Sequence[str] = ()
    reuse_text: bool = False
    page_path: str | os.PathLike[str] | None = None
    loading: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    terms: EndTerms = dataclasses.field(default_factory=EndTerms)
    on_throughput: Callable[[WorkerReport], None] = lambda own: None
    on_progress: Callable[[int, int], None] = lambda num_ok, num_failed: None
    open_store: Callable[[str], Store] = open_store
    on_pace: dataclasses.InitVar[Callable[[WorkerReport], None] | None] = None

    def __post_init__(self, on_pace: Callable[[WorkerReport], None] | None) -> None:
        if on_pace is not None:
            warn_of("JobOptions.on_pace", FIELDS["JobOptions.on_pace"], 4)
            object.__setattr__(self, "on_throughput", on_pace)

    def is_exceeded_by(self, num_failed: int) -> bool:
        """Whether `num_failed` rows are more than `max_errors`."""
        return self.max_errors is not None and num_failed > self.max_errors


class Keeper:
    """A thread that flushes the journal and beats the heart; a context manager. What it raises, `check` raises."""

    def __init__(self, journal: Journal, leases: Leases, options: JobOptions) -> None:
        self.journal, self.leases, self.options = journal, leases, options
        self._ended = system.Event()
        self._error: BaseException | None = None
        self._thread = system.Thread(target=self._run, name="journal", daemon=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        beat_s = self.options.expiry_s / 4
        beaten_s = system.monotonic()
        try:
            while not self._ended.wait(min(self.options.flush_s, beat_s)):
                if system.monotonic() - beaten_s >= beat_s:
                    self.leases.beat()
                    beaten_s = system.monotonic()
                self.journal.flush()
        except BaseException as error:  # the loop raises it
            self._error = error
