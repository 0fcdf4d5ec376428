"""The clerk: has a server's batches answered, one after the other, and ends those that are cancelled or too old.

Keys take turns, and a batch that fails waits while others go on.

    validating -> in_progress -> finalizing -> completed        or failed, expired, cancelled

A batch is a job of `ferrum_jax.batch`, so a row that was answered stays answered whatever is killed. Every state can be
entered again: a clerk that is started anew takes up each batch in the state that its record has. One clerk works at a
folder, which a lease sees to; others wait until it is gone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from ferrum_jax.batch.batch_llm import BatchLLM
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import EXIT_OK, EXIT_ROWS_FAILED, JobOptions, JobSettings, run_batch
from ferrum_jax.batch.journal.job_folder import JobFolder
from ferrum_jax.batch.journal.job_identity import SettingsChanged
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.journal.leases import LeaseLost
from ferrum_jax.batch.journal.merge import merge
from ferrum_jax.batch.notice import EXIT_PREEMPTED, Notice
from ferrum_jax.core.progress import plain_console
from ferrum_jax.io import system
from ferrum_jax.io.files.store import open_local, open_store
from ferrum_jax.io.files.whole_files import is_of_full_disk
from ferrum_jax.io.watched_threads import start_thread
from ferrum_jax.serve.batches.batch_folder import BatchFolder, output_id
from ferrum_jax.serve.batches.clerk_lease import BEAT_S, lease_of
from ferrum_jax.serve.batches.ended_lines import Counts, parted, write_expired
from ferrum_jax.serve.batches.input_lines import InputRules, checked_input
from ferrum_jax.serve.batches.link_llm import EngineGone
from ferrum_jax.serve.batches.pauses import Pauses
from ferrum_jax.serve.batches.stored import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    AskedBatch,
    BatchState,
)

_log = logging.getLogger("ferrum_jax.serve")
_MOST_FAILURES = 5  # of one batch in turn, with a pause between them
_MOST_PAUSES = 6  # in one


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClerkTimes:
    """In seconds. poll_s: between two looks at the folder. flush_s: between two segments of a job's journal.

    expiry_s: after which a try that could not say that it ended, on a full disk, is taken for dead by the next one.
    pause_s: after a try that failed; later ones are longer. now: gives the seconds since 1970.
    """

    poll_s: float = 0.5
    flush_s: float = 1.0
    expiry_s: float = 10.0
    pause_s: float = 10.0
    now: Callable[[], float] = lambda: system.now()


class Clerk:
    """One clerk of a folder."""

    def __init__(
        self,
        folder: BatchFolder,
        llm_for: Callable[[str], BatchLLM],
        rules_of: Callable[[str], InputRules],
        times: ClerkTimes | None = None,
    ) -> None:
        """llm_for: the engine for an owner's rows. rules_of: an endpoint's input."""
        self._folder, self._llm_for, self._rules_of = folder, llm_for, rules_of
        self._times = times or ClerkTimes()
        self._ended = system.Event()
        self._current: _Current | None = None
        self._is_clear = False  # nothing is left of what an earlier clerk ended
        self._final: set[str] = set()  # ids of batches that have ended
        self._turns: dict[str, int] = {}  # by owner: when its last batch ended
        where, pause_s = f"batches in {folder.root}", self._times.pause_s
        pauses = functools.partial(Pauses, where, first_s=pause_s, most_s=_MOST_PAUSES * pause_s)
        self._looks = Pauses(where, first_s=self._times.poll_s, most_s=BEAT_S)
        self._disk, self._failures = pauses(), defaultdict[str, Pauses](pauses)  # by id of batches

    def end(self) -> None:
        """Has it stop, in order: rows that are answered are kept. From any thread."""
        self._ended.set()

    def run(self) -> None:
        """Works until `end`."""
        with lease_of(self._folder, self._looked, lambda: self._ended.wait(self._times.poll_s)) as beat:
            while not self._ended.wait(self._times.poll_s):
                self._looked(lambda: self._look(beat))
            if self._current is not None:
                self._current.notice.give("the server ends", EXIT_PREEMPTED)
                self._current.thread.join()

    def _looked(self, look: Callable[[], bool]) -> bool:
        """What a look at the folder gives; False where it is tried again later, as a disk is full or a store away."""
        if not self._looks.is_over:
            return False
        try:
            found = look()
        except LeaseLost:
            raise
        except OSError as error:
            self._looks.begin(error)
            return False
        self._looks.end()
        return found

    # -- which batch -----------------------------------------------------------------------------------

    def _look(self, beat: Callable[[], None]) -> bool:
        """Ends what is to be ended, and begins the next batch that waits."""
        beat()
        if not self._is_clear:
            self._folder.clear_jobs()
            self._is_clear = True
        if self._current is not None and not self._current.thread.is_alive():
            self._current = None
        for asked in self._open():
            ends_as = self._ends_as(asked)
            if self._current is not None and asked.id == self._current.asked.id:
                if ends_as is not None:
                    self._current.notice.give(ends_as, EXIT_PREEMPTED, is_urgent=False)
            elif not (self._disk.is_over and self._failures[asked.id].is_over):
                continue
            elif ends_as is not None:
                self._attempt(asked, functools.partial(self._end, asked, ends_as))
            elif self._current is None:
                self._current = _Current(asked, self._work, self.end)
        return True

    def _open(self) -> list[AskedBatch]:
        """Batches that have not ended, the next one first: one that was begun, then keys by turns, of each the oldest.

        One whose record cannot be read is passed over.
        """
        found = []
        for asked in self._folder.batches():
            state = None if asked.id in self._final else self._folder.state(asked.id)
            if state is None or (state.is_final and self._current is not None and self._current.asked.id == asked.id):
                continue
            if state.is_final:
                ended = max(state.times.values(), default=0)
                self._turns[asked.owner] = max(self._turns.get(asked.owner, 0), ended)
                self._final.add(asked.id)
            else:
                found.append((asked, state))
        found.sort(key=lambda each: (each[1].status == VALIDATING, self._turns.get(each[0].owner, 0)))
        return [asked for asked, _ in found]

    def _ends_as(self, asked: AskedBatch) -> str | None:
        """CANCELLED or EXPIRED of a batch that is to end now, else None."""
        if self._folder.cancelled_at(asked.id) is not None:
            return CANCELLED
        return EXPIRED if self._times.now() >= asked.expires else None

    # -- one batch -------------------------------------------------------------------------------------

    def _work(self, current: _Current) -> None:
        """On a thread of its own."""
        self._attempt(current.asked, lambda: self._advance(current.asked, current.notice))

    def _attempt(self, asked: AskedBatch, step: Callable[[], None]) -> None:
        """Takes a step of a batch. One that fails is taken again later; a job that cannot go on fails the batch."""
        try:
            try:
                step()
            except EngineGone:  # it goes on when the server does
                _log.warning("batch %s: the engine is gone", asked.id)
                return
            except ValueError as error:
                told = _told(error)
                _log.error("batch %s cannot go on: %s", asked.id, told or error)
                self._fail(asked, "job_refused", told or "the server cannot go on with this batch; its log says why")
            self._failures.pop(asked.id, None)
            self._disk.end()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if is_of_full_disk(error):
                self._disk.begin(error)  # no fault of the batch, which is tried until its window is over
                return
            if not isinstance(error, OSError):
                _log.exception("batch %s: it is tried again", asked.id)
            self._failures[asked.id].begin(error)

    def _state(self, asked: AskedBatch) -> BatchState:
        state = self._folder.state(asked.id)
        if state is None or self._folder.batch(asked.id) is None:  # which is deleted first
            raise OSError(f"the record of {asked.id} cannot be read any more")
        return state

    def _advance(self, asked: AskedBatch, notice: Notice) -> None:
        """Takes a batch from the state that it has to its end, or to the notice."""
        state = self._state(asked)
        if (count := self._failures[asked.id].num_begun) >= _MOST_FAILURES:
            self._fail(asked, "server_error", f"the server failed {count} times in turn; its log says how")
            return
        is_begun = state.status == IN_PROGRESS and self._job(asked).record() is not None
        if state.status == VALIDATING or (state.status == IN_PROGRESS and not is_begun):  # names may be others now
            state = self._validate(asked, state)
        if state.status == IN_PROGRESS:
            state = self._answer(asked, state, notice)
        if state.status == FINALIZING:
            self._settle(asked, state, COMPLETED)
        elif not state.is_final and notice.reason in (CANCELLED, EXPIRED):
            self._settle(asked, state, notice.reason)

    def _keep(self, asked: AskedBatch, state: BatchState) -> BatchState:
        self._folder.keep_state(asked.id, state)
        return state

    def _end(self, asked: AskedBatch, status: str, *errors: Mapping[str, Any]) -> None:
        """Ends a batch with the output so far."""
        self._settle(asked, self._state(asked), status, *errors)

    def _fail(self, asked: AskedBatch, code: str, why: str) -> None:
        self._end(asked, FAILED, _error(code, why))

    def _now(self) -> int:
        return int(self._times.now())

    def _validate(self, asked: AskedBatch, state: BatchState) -> BatchState:
        with open_local(self._folder.content_path(asked.input_file)) as file:
            found = checked_input(file, self._rules_of(asked.endpoint))
        if found.errors:
            return self._keep(asked, state.entered(FAILED, self._now(), errors=found.errors))
        return self._keep(asked, state.entered(IN_PROGRESS, self._now(), num_rows=found.num_rows))

    def _answer(self, asked: AskedBatch, state: BatchState, notice: Notice) -> BatchState:
        """Runs the job; the state after it, which is still IN_PROGRESS where notice was given."""
        told_s, counts = system.monotonic(), (state.num_ok, state.num_failed)

        def tell(num_ok: int, num_failed: int) -> None:
            nonlocal told_s, counts
            if (num_ok, num_failed) != counts and system.monotonic() - told_s > self._times.poll_s:
                counts, told_s = (num_ok, num_failed), system.monotonic()
                self._keep(asked, dataclasses.replace(state, num_ok=num_ok, num_failed=num_failed))

        names = self._rules_of(asked.endpoint).names
        code = run_batch(
            lambda start: self._llm_for(asked.owner),
            self._folder.content_path(asked.input_file),
            self._folder.job_path(asked.id),
            model=names[0],
            settings=JobSettings(names=names[1:], now=lambda: asked.created),
            options=JobOptions(flush_s=self._times.flush_s, expiry_s=self._times.expiry_s, on_progress=tell),
            console=plain_console(quiet=True),
            notice=notice,
        )
        if notice.is_given:
            return state
        if code not in (EXIT_OK, EXIT_ROWS_FAILED):
            raise OSError(f"the job of {asked.id} was stopped with exit code {code}")
        return self._keep(asked, state.entered(FINALIZING, self._now()))

    def _job(self, asked: AskedBatch) -> JobFolder:
        return JobFolder(self._folder.job_path(asked.id), open_store)

    # -- its end ---------------------------------------------------------------------------------------

    def _settle(self, asked: AskedBatch, state: BatchState, status: str, *errors: Mapping[str, Any]) -> None:
        """Writes the files of what was answered, then the batch's last state; the same again after a kill.

        A journal that cannot be read, however often, is kept, and the batch fails without files.
        """
        try:
            state = self._with_files(asked, state, status)
        except Exception as error:
            if is_of_full_disk(error) or self._failures[asked.id].num_begun <= _MOST_FAILURES:
                raise
            _log.exception(
                "batch %s: its answers cannot be read and are left in jobs/%s.jsonl.journal", *[asked.id] * 2
            )
            unread = _error("server_error", "the answers cannot be read; the server's log says why, and keeps them")
            self._keep(asked, state.entered(FAILED, self._now(), errors=(*errors, unread)))
            return
        self._keep(asked, state.entered(status, self._now(), errors=errors))
        self._folder.remove_job(asked.id)

    def _with_files(self, asked: AskedBatch, state: BatchState, status: str) -> BatchState:
        """The state of a batch whose files hold what its job has: the output of one that is done.

        Else what the journal lists, which a store may do late.
        """
        if not state.num_rows:
            return state
        with system.TemporaryFile() as answers, system.TemporaryFile() as errors:
            if status == COMPLETED:
                with open_local(self._folder.job_path(asked.id)) as lines:
                    found = parted(lines, answers, errors)
            else:
                found = self._gather(asked, answers, errors, with_expired=status == EXPIRED)
            output = self._keep_file(asked, "output", answers, found.ok_bytes)
            error = self._keep_file(asked, "error", errors, found.failed_bytes)
        counts = {"num_ok": found.num_ok, "num_failed": found.num_failed}
        return dataclasses.replace(state, **counts, output_file=output, error_file=error)

    def _keep_file(self, asked: AskedBatch, what: str, content: BinaryIO, num_bytes: int) -> str | None:
        """The id of a file that the batch gives; None of an empty one, which is not kept."""
        if not num_bytes:
            return None
        kept = self._folder.add_file(
            content,
            num_bytes,
            is_owed=True,
            id=output_id(asked.id, what),
            owner=asked.owner,
            filename=f"{asked.id}_{what}.jsonl",
            purpose="batch_output",
            created=self._now(),
        )
        return kept.id

    def _gather(self, asked: AskedBatch, answers: BinaryIO, errors: BinaryIO, *, with_expired: bool) -> Counts:
        """Parts the lines that the job's journal has, in the order of the input, whatever the model is called now."""
        place = self._job(asked)
        with open_local(self._folder.content_path(asked.input_file)) as raw, system.TemporaryFile() as lines:
            rows = Rows(raw, 0)
            journal = Journal(place.journal, rows, system.token_hex(8))
            journal.refresh()
            merge(rows, journal, lines)
            lines.seek(0)
            found = parted(lines, answers, errors)
            num_expired = write_expired(rows, journal, errors) if with_expired else 0
        return found._replace(num_failed=found.num_failed + num_expired, failed_bytes=errors.tell())


def _error(code: str, why: str) -> Mapping[str, Any]:
    return {"code": code, "message": why, "line": None, "param": None}


def _told(error: ValueError) -> str | None:
    """Why a job cannot go on, where that can be told to who asked for it, without paths and options of the server."""
    if not isinstance(error, SettingsChanged):
        return None
    changes = "; ".join(error.changes)
    return f"the server now serves other settings than those with which this batch began: {changes}"


class _Current:
    """The batch that is worked on, and how it is told to stop."""

    def __init__(self, asked: AskedBatch, work: Callable[[_Current], None], on_failure: Callable[[], None]) -> None:
        self.asked, self.notice = asked, Notice()
        self.thread = start_thread(lambda: work(self), lambda why: on_failure(), name="ferrum-batch")
