"""A worker: takes parts of a job, runs their rows through an engine and journals what becomes of each.

A row's line counts once it is durable. A thread writes the journal and the heartbeat at intervals; the loop here only
adds records. When notice is given, no row is admitted any more, rows in progress are journaled with their tokens and
the loop ends. A row fails alone; if the engine itself crashes, every row that it had is run again by itself, and one
that crashes it again is set aside with an error line.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ferrum_jax.batch.batch_llm import BatchLLM, RowCrash, RowRequest, run_rows
from ferrum_jax.batch.earlier.answers import EarlierAnswers
from ferrum_jax.batch.engine_rows import EngineRows, num_written
from ferrum_jax.batch.input.formats import BadRow, Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.job_identity import JobIdentity, JobRefused
from ferrum_jax.batch.journal.journal import CRASH, FAILED, OK, PARTIAL, REUSED
from ferrum_jax.batch.journal.keeper import Keeper
from ferrum_jax.batch.journal.partials import encode_partial
from ferrum_jax.batch.journal.parts import JobParts
from ferrum_jax.batch.journal.responses import answered_line, failed_line, texts_of
from ferrum_jax.batch.notice import Notice
from ferrum_jax.batch.report.display import Display
from ferrum_jax.batch.report.recorder import Recorder
from ferrum_jax.batch.row_answers import Answer, was_aborted
from ferrum_jax.batch.share import WorkShare
from ferrum_jax.batch.structure_cuts import cut_off
from ferrum_jax.batch.timekeeper import Timekeeper
from ferrum_jax.core.outputs import NOT_FINITE_REASON, RequestOutput
from ferrum_jax.inputs.prompt import take_apart
from ferrum_jax.io import system
from ferrum_jax.openai.asked import TRANSCRIBES
from ferrum_jax.tasks.transcription.reading_ahead import READ_AHEAD, SoundsAhead

_MAX_CRASHES = 2  # of the engine with one row
_SHOW_INTERVAL_S = 0.05
_LEARNT_BYTES = 4 << 20  # of answers in the journal: a million tokens, which drafts come from
_MAX_CRASHES_IN_TURN = 4  # with no row finished between them: it is not the rows then


class Worker:
    """Runs rows until none is left, notice is given or too many have failed."""

    def __init__(
        self,
        *,
        rows: Rows,
        job: JobIdentity,
        keeper: Keeper,
        timekeeper: Timekeeper,
        notice: Notice,
        display: Display,
        recorder: Recorder,
        earlier: EarlierAnswers | None,
    ) -> None:
        """keeper: of the worker's journal and leases, which makes what this loop adds durable. earlier: for rows."""
        self._rows, self._job, self._notice, self._display, self._time = rows, job, notice, display, timekeeper
        self._earlier = earlier
        self._journal, self._options = keeper.journal, keeper.options
        self._check, self._recorder, self._tally = keeper.check, recorder, display.tally
        self._stats: Callable[[], Mapping[str, Any]] | None = None
        self._share = WorkShare(
            JobParts(rows.parts(), keeper.leases, unfinished=self._journal.unfinished, refresh=self._journal.refresh),
            keeper.leases,
            timekeeper.forecaster,
            num_undone=lambda: self._journal.num_undone,
            least_s=keeper.options.share_s,
        )
        self._queue = self._share.queue
        self._open, self._sounds = EngineRows(len(rows)), SoundsAhead[int, Any]()
        self._suspects: deque[tuple[int, int]] = deque()  # rows with which the engine crashed, to be run alone
        self._num_told = self._num_crashes_in_turn = 0
        self._own_error: Exception | None = None
        self._partials_s = self._shown_s = system.monotonic()
        self._is_idle = False

    @property
    def is_over(self) -> bool:
        self._time.keep()
        return self._notice.is_given or self.has_too_many_errors

    @property
    def has_left_early(self) -> bool:
        """Whether others run all rows that are left, and this worker need not wait for them."""
        return self._options.leaves_early and self._share.is_done and not self._journal.is_complete

    @property
    def has_too_many_errors(self) -> bool:
        return self._options.is_exceeded_by(self._tally.num_failed)

    def run(self, make_llm: Callable[[], BatchLLM]) -> BatchLLM | None:
        """To the end. Raises OSError if files fail, and what the engine raises if it is not one row's fault."""
        llm: BatchLLM | None = None
        while not self._journal.is_complete and not self.is_over:
            self._share.return_to_passed()
            if self._share.is_closed or not (self._queue or self._suspects or self._take()):
                if self._time.leave(self._share.num_passed) or self.has_left_early:
                    break
                if not self._is_idle:
                    self._time.tell_soon()
                self._is_idle = True
                self._notice.wait(self._options.poll_s)  # other workers have the rest
                self._check()
                self._journal.refresh()
                self._show()
                continue
            self._is_idle = False
            with self._notice.orderly(False):
                if llm is None:
                    llm = make_llm()
                    self._tally.started_s, self._stats = system.monotonic(), llm.stats
                    self._time.forecaster.progress = functools.partial(self._progress, llm)
                    self._sample()
                    self._teach(llm)
            if self._queue:
                self._session(llm, self._requests())
            while self._suspects and not self.is_over:
                self._session(llm, iter([self._suspects.popleft()]))
            self._journal.flush()
            self._show()
        self._sounds.close()
        return llm

    def _teach(self, llm: BatchLLM) -> None:
        """Rows to come resemble those that the journal has answers to, so tokens are drafted from these."""
        for index, line in self._journal.answers(_LEARNT_BYTES):
            row = self._rows.read(index)
            if isinstance(row, Row) and (texts := texts_of(line)):
                llm.learn(texts, cache_salt=take_apart(row.prompts[0]).cache_salt)

    # -- which rows --------------------------------------------------------------------------------------

    def _take(self) -> bool:
        """Queues rows that nobody has; False if there are none for this worker."""
        rows = self._share.take()
        self._rows.expect(rows)
        return bool(rows)

    def _requests(self) -> Iterator[tuple[int, int]]:
        """Queued rows and those of further parts, with their epochs; those that crashed the engine wait."""
        while not (self.is_over or self._share.is_closed or self._share.is_done) and (self._queue or self._take()):
            index, epoch = self._queue.popleft()
            if index in self._journal.num_crashes:
                self._suspect(index, epoch)
            elif self._share.admits(index, epoch):
                yield index, epoch
            self._share.return_to_passed()

    def _suspect(self, index: int, epoch: int) -> None:
        """A row with which the engine crashed: run alone, or set aside."""
        if self._journal.num_crashes[index] < _MAX_CRASHES:
            self._suspects.append((index, epoch))
        else:
            self._set_aside(index, self._rows.read(index), epoch)

    def _set_aside(self, index: int, row: Row | BadRow, epoch: int) -> None:
        message = f"the engine crashed {_MAX_CRASHES} times while it ran this row; the row is set aside"
        self._fail(index, BadRow(id=row.id, custom_id=row.custom_id, code="engine_crash", message=message), epoch)

    def _source(self, llm: BatchLLM, rows: Iterator[tuple[int, int]]) -> Iterator[RowRequest]:
        """The engine's requests."""
        with self._own_errors():
            for index, epoch in rows:
                row = self._rows.read(index)
                assert isinstance(row, Row), f"row {index} is bad and was to be run"
                if row.kind == TRANSCRIBES:
                    try:
                        row = self._with_windows(llm, index, row)
                    except ValueError as error:
                        self._fail(index, _bad_row(row, str(error)), epoch)
                        continue
                if self._earlier is not None and self._reuse(self._earlier, llm, index, row, epoch):
                    continue
                before = self._journal.partial(index)
                self._time.forecaster.meter.begin(index, num_written(before))
                yield from self._open.begin(index, row, epoch, before)

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """What fails in the block, wherever the engine calls it, is the job's fault and not the engine's or a row's."""
        try:
            yield
        except Exception as error:
            self._own_error = error
            raise

    def _with_windows(self, llm: BatchLLM, index: int, row: Row) -> Row:
        """The row of a sound that is read; the sounds that are likely to come next are read meanwhile.

        Raises ValueError for a sound that cannot be read, and for what the model cannot do.
        """
        for each in (index, *(following for following, _ in islice(self._queue, READ_AHEAD))):
            if self._rows.kinds[each] != TRANSCRIBES:
                continue
            if isinstance(named := row if each == index else self._rows.read(each), Row):
                self._sounds.begin(each, functools.partial(llm.hear, named.prompts[0], named.how.how))
        return row.with_windows(self._sounds.take(index).result())

    # -- what becomes of them ----------------------------------------------------------------------------

    def _session(self, llm: BatchLLM, rows: Iterator[tuple[int, int]]) -> None:
        """Runs the rows to their end, to the notice or to a crash of the engine."""
        completions = run_rows(
            llm,
            self._source(llm, rows),
            now=self._job.started,
            wants_partials=self._wants_partials,
            most_running=lambda: self._time.forecaster.most_together,
        )
        with contextlib.closing(completions):
            while not self._open.has_said_all:
                try:
                    item = next(completions, None)
                except JobRefused:
                    raise
                except Exception as error:
                    if error is self._own_error:
                        raise
                    self._crash(error)
                    return
                if item is None:
                    assert not self._open, f"rows {sorted(self._open)[:5]} were not answered"
                    return
                self._job.begin(llm.identity)  # the weights may be others than at the last line
                if was_aborted(item[1]):
                    break
                self._receive(*item)
        if not self.is_over:
            self._leave_engine()

    def _leave_engine(self) -> None:
        """Rows that the engine had go to others, or are begun again beside further ones, from their tokens."""
        self._journal.flush()
        self._share.leave_engine(self._forget_open())

    def _forget_open(self) -> list[tuple[int, int]]:
        """Forgets the engine's rows; returns them with their epochs."""
        had = self._open.by_epoch
        for index in self._open:
            self._time.forecaster.meter.drop(index)
        self._open.forget()
        return had

    def _wants_partials(self) -> bool:
        """At intervals, and once more, for the last time, when the job is to end."""
        now_s = system.monotonic()
        if self._stats is not None:
            self._sample()
            with self._own_errors():  # a store may be away
                self._look()
        if self.is_over or self._share.breaks:
            return self._open.ask_last()
        if now_s - self._partials_s < self._options.partials_s:
            return False
        self._partials_s = now_s
        return True

    def _progress(self, llm: BatchLLM) -> Mapping[int, tuple[float, float]]:
        """How far rows are, as `RowMeter.note` takes it; tells the tally what is read of their prompts."""
        counts = self._open.progress(llm.progress())
        self._tally.num_reading = int(sum(num_read for num_read, _, _ in counts.values()))
        return {
            index: (num_read / max(num_prompt, 1), written) for index, (num_read, num_prompt, written) in counts.items()
        }

    def _receive(self, key: int, output: Answer) -> None:
        self._check()
        place, index = self._open.of(key)
        row, epoch, answers = self._open[index]
        if answers.begins_anew(place, output):
            self._display.say(
                f"{row.custom_id}: an image is not what it was when the row was begun, so the row "
                "was begun anew; rows that are answered keep their answers, --new-run answers them again"
            )
        answers.put(place, output)
        self._open.heard(key, output)
        choices, whole = answers.take_choices(), answers.whole
        if whole is not None:
            self._end(index, whole)
        elif choices is not None:
            self._journal.append(PARTIAL, index, encode_partial(choices), epoch)

    def _end(self, index: int, answers: Sequence[Answer]) -> None:
        """A row's line: its answers, or the error of the first of its prompts that has one."""
        row, epoch, _ = self._open.close(index)
        self._num_crashes_in_turn = 0
        error = next((answer for answer in answers if isinstance(answer, ValueError)), None)
        if isinstance(error, RowCrash):
            self._set_aside(index, row, epoch)
        elif error is not None:
            self._fail(index, _bad_row(row, str(error)), epoch)
        elif self._job.requires_valid and (cut := cut_off(row, answers)) is not None:
            self._fail(index, cut, epoch)
        else:
            self._answer(index, row, answers, epoch)
        if system.monotonic() - self._shown_s > _SHOW_INTERVAL_S:
            self._show()

    def _answer(self, index: int, row: Row, answers: Sequence[Any], epoch: int) -> None:
        """answers: none of them an error."""
        try:
            line = answered_line(row, answers, self._job.label)
        except ValueError as error:  # more dimensions than the vectors have
            self._fail(index, _bad_row(row, str(error)), epoch)
            return
        self._journal.append(OK, index, line[:-1], epoch)
        self._tally.count(answers)
        self._time.forecaster.meter.end(
            index, sum(num_written(each.outputs) for each in answers if isinstance(each, RequestOutput))
        )

    def _reuse(self, earlier: EarlierAnswers, llm: BatchLLM, index: int, row: Row, epoch: int) -> bool:
        """Whether an earlier job answered the row's request, so that the row has its line without the engine."""
        line = earlier.line(llm, row, self._job)
        if line is None:
            return False
        self._journal.append(REUSED, index, line[:-1], epoch)
        self._time.forecaster.meter.drop(index)
        self._tally.num_own += 1
        if system.monotonic() - self._shown_s > _SHOW_INTERVAL_S:
            self._show()
        return True

    def _fail(self, index: int, bad: BadRow, epoch: int) -> None:
        self._journal.append(FAILED, index, failed_line(bad)[:-1], epoch)
        self._time.forecaster.meter.drop(index)
        self._tally.num_own += 1
        if self._options.max_errors is not None:
            self._journal.flush()  # so that it is counted
            self._show()

    def _crash(self, error: Exception) -> None:
        """Remembers which rows the engine had, durably; raises the error if it happens whatever the engine has."""
        for index, epoch in self._open.by_epoch:
            self._journal.append(CRASH, index, type(error).__name__.encode(), epoch)
        self._journal.flush()
        self._num_crashes_in_turn += 1
        if self._num_crashes_in_turn >= _MAX_CRASHES_IN_TURN:
            raise error
        self._display.say(f"the engine crashed with {error!r}; each row that it had is run again by itself")
        for index, epoch in self._forget_open():
            self._suspect(index, epoch)

    def _sample(self) -> None:
        """Records what is computed, of rows in progress too."""
        assert self._stats is not None, "an engine was made"
        if self._recorder.is_due:
            self._time.forecaster.note()
            self._tally.num_written = int(self._time.forecaster.meter.num_written)
            self._recorder.sample(self._stats)

    def _look(self) -> None:
        """At the clock, and at other workers where they were read anew."""
        self._time.update(self._tally)
        if self._num_told != self._time.num_told:
            self._num_told = self._time.num_told
            self._share.look()

    def _show(self) -> None:
        self._shown_s = system.monotonic()
        self._tally.num_ok = self._journal.num_ok
        self._tally.num_failed = self._rows.num_bad + self._journal.num_failed
        self._tally.num_reused = self._journal.num_reused
        if self._stats is not None:
            self._sample()
        self._look()
        self._tally.num_given = self._share.num_given
        self._display.update()
        self._options.on_progress(self._tally.num_ok, self._tally.num_failed)


def _bad_row(row: Row, why: str) -> BadRow:
    """The error of a row that ran, or was to run, and has no answer."""
    bad = BadRow(id=row.id, custom_id=row.custom_id, code="invalid_request", message=why)
    return bad._replace(code="logits_not_finite") if why == NOT_FINITE_REASON else bad
