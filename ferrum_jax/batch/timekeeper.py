"""The timekeeper: tells a worker's forecaster what happens in the job, and the user, the journal and the notice what
follows from it.

The worker's loop calls it; nothing here has a thread of its own.
"""

import math
from collections.abc import Callable
from typing import Any

from ferrum_jax.batch.deadline.end_terms import EndTerms, said
from ferrum_jax.batch.deadline.forecaster import BUDGET, TIME, Forecaster, Outlook
from ferrum_jax.batch.deadline.phrases import progress_phrase, terms_phrase, verdict_phrase
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.journal.journal import Journal
from ferrum_jax.batch.notice import EXIT_PREEMPTED, Notice
from ferrum_jax.batch.report.display import Tally
from ferrum_jax.batch.worker_reports import WorkerReports
from ferrum_jax.io import system

_LOOK_S, _MAX_TELL_S = 1.0, 10.0  # between two forecasts; between two looks at other workers
_TELLS = 0.1  # of the time that the run has taken, or takes yet: so much between two looks at other workers
_MAX_LOOKING = 100  # a look takes at most one part in so many of the time
_SURE_SPREAD = 0.2  # of a forecast by which a job is said to fit


def look_pause_s(left_s: float, spent_s: float, took_s: float, *, least_s: float) -> float:
    """How long to wait between two looks at other workers.

    left_s, spent_s: of the job and of this run. took_s: the last look, which holds up the run.
    """
    pause_s = max(_TELLS * min(left_s, spent_s), least_s)
    return max(min(pause_s, _MAX_TELL_S), _MAX_LOOKING * took_s)


class Timekeeper:
    """Keeps the time and the budget of one worker's run."""

    def __init__(
        self,
        terms: EndTerms,
        *,
        rows: Rows,
        journal: Journal,
        reports: WorkerReports,
        notice: Notice,
        say: Callable[[str], None],
    ) -> None:
        """reports: of the job, for this worker. say: shows the user a line."""
        self._terms, self._rows, self._journal, self._notice, self._say = terms, rows, journal, notice, say
        self._reports, self._clock = reports, system.monotonic
        self.forecaster = Forecaster(
            rows.tokens,
            clock=self._clock,
            worker=reports.worker,
            end_s=None if terms.deadline is None else system.monotonic() + terms.deadline - system.now(),
            budget=terms.budget,
            price_per_hour=terms.price_per_hour,
        )
        self._said: bool | None = None  # whether it fits, as it was last said
        self._look_s = self._told_s = self._clock()
        self._took_s = 0.0  # the last look at other workers
        self.num_told = 0  # how often other workers were looked at
        self.outlook: Outlook | None = None
        self.has_stopped = False  # for time or money

    def start(self) -> None:
        """Says what the run was told of its end, and whether that fits where earlier runs were measured.

        Raises ValueError for a budget that is spent.
        """
        self.forecaster.tell(self._reports.others())
        if self.forecaster.over == BUDGET:
            raise ValueError(
                f"the job has cost {self.forecaster.spent_elsewhere:,.2f} of its budget of {self._terms.budget:,.2f}, "
                "and what is left is no time to answer a row; give a higher --budget"
            )
        if self._terms.has_end:
            self._say(terms_phrase(self._terms, system.now(), self.forecaster.spent_elsewhere))
        self._look()
        self.keep()

    def keep(self) -> None:
        """Stops the run where its time or budget is at an end."""
        over = self.forecaster.over
        if over == TIME and self._terms.deadline is not None:
            self._stop(f"the time of this run ends, {said(self._terms.deadline)}")
        elif over == BUDGET:
            self._stop(f"the job's budget of {self._terms.budget:,.2f} is spent")

    def leave(self, num_passed: int) -> bool:
        """Stops the run if rows are left that would not end in time; whether it did. num_passed: how many these are."""
        if not num_passed:
            return False
        what = "time of this run" if self._terms.deadline is not None else "job's budget"
        self._stop(f"the {what} ends before the rows that are left would")
        return True

    def _stop(self, why: str) -> None:
        self.has_stopped = self.has_stopped or not self._notice.is_given
        self._notice.give(why, EXIT_PREEMPTED, is_urgent=False)

    def update(self, tally: Tally) -> None:
        """Looks at the clock, and now and then at the job; puts what is expected into the tally."""
        self.keep()
        if self._clock() < self._look_s:
            return
        left_s = math.inf if self.outlook is None else self.outlook.seconds
        pause_s = look_pause_s(left_s, self.forecaster.spent_s, self._took_s, least_s=self._reports.least_s)
        if self._clock() - self._told_s >= pause_s:
            self._tell()
        started_s = self._clock()
        self._look()
        now = self._clock()
        self._look_s = now + max(min(_LOOK_S, self._reports.least_s), _MAX_LOOKING * (now - started_s))
        if self.outlook is not None:
            tally.left_s = self.outlook.seconds
            tally.outlook = progress_phrase(self.outlook, self._terms, system.now())

    @property
    def more(self) -> str:
        """The change to the command without which it would stop again, or ""."""
        is_spent = self.has_stopped and self.forecaster.over == BUDGET
        return " with a higher --budget" if is_spent else ""

    def report(self, partial: str | None) -> dict[str, Any]:
        """The job's entry of report.json; none where the run was told nothing. partial: path of the lines so far."""
        terms = self._terms
        if terms == EndTerms():
            return {}
        return {
            "ending": {
                "deadline": None if terms.deadline is None else said(terms.deadline),
                "budget": terms.budget,
                "price_per_hour": terms.price_per_hour,
                "cost": None if self.forecaster.spent is None else round(self.forecaster.spent, 4),
                "partial": partial,
            }
        }

    def end(self, tally: Tally) -> None:
        """Writes what this worker knows of itself, for those that come later."""
        tally.cost = self.forecaster.spent
        self._reports.write(self.forecaster.report(), ended=True)

    def tell_soon(self) -> None:
        """Has this worker say at its next look that it has nothing to run."""
        self._told_s = self._look_s = -math.inf

    def _tell(self) -> None:
        started_s = self._clock()
        self.num_told += 1
        self._reports.write(self.forecaster.report())
        others = self._reports.others()
        if any(each.is_alive for each in others):
            self._journal.refresh()
        self.forecaster.tell(others)
        self._told_s = self._clock()
        self._took_s = self._told_s - started_s

    def _look(self) -> None:
        self.outlook = self.forecaster.outlook(self._journal.unfinished(self._rows.order))
        if self.outlook is None or not self._terms.has_end:
            return
        fits = self.outlook.fits
        is_sure = fits is False or self.outlook.spread <= _SURE_SPREAD  # late, it can be said but not mended
        if fits is not None and fits != self._said and is_sure:
            self._say(verdict_phrase(self.outlook, self._terms, system.now()))
            self._said = fits
