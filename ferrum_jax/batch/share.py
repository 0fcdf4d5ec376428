"""A worker's share of a job: the rows that it has, what it takes next, and what it gives back to others.

It takes by its throughput, so that unlike workers end together. It gives rows that it has not begun to idle workers.
When the rows that are left fit into fewer workers, the slower ones give back what they run, with its tokens, and are
done. One worker has the lease of the end and never is, so nobody leaves the last rows to one that leaves them too.
"""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from ferrum_jax.batch.deadline.forecaster import Forecaster
from ferrum_jax.batch.deadline.workers import Workers
from ferrum_jax.batch.journal.leases import Leases
from ferrum_jax.batch.journal.parts import JobParts

_MAX_LOOKED_AT = 64  # of the rows that were passed over, at once
_MAX_PASSED = 64  # rows that would not end in time, one after the other
_END = "last"  # the lease of the worker that stays until all rows are done


class WorkShare:
    """One worker's rows of a job. breaks: the engine should be left, for running rows are to be given back or joined
    by others."""

    def __init__(
        self, parts: JobParts, leases: Leases, forecaster: Forecaster, *, num_undone: Callable[[], int], least_s: float
    ) -> None:
        """num_undone: rows of the job that have no line. least_s: what is shared or moved takes as long at least."""
        self._parts, self._leases, self._forecaster = parts, leases, forecaster
        self._num_undone, self._least_s = num_undone, least_s
        self.queue: deque[tuple[int, int]] = deque()  # rows to run, with their epochs
        self._passed: deque[tuple[int, int]] = deque()  # rows that would not have ended in time when their turn came
        self._num_passed_in_turn = 0
        self._num_fresh = 0  # rows at the queue's end, of the part that was taken last
        self._is_dry = False  # the engine was told that there is no further row
        self.num_given = 0  # rows that others got
        self.is_done = False  # others run all rows that are left
        self._stays = False  # and this worker is the one that they leave them to
        self.breaks = False
        forecaster.queue = self.queue

    def take(self) -> list[int]:
        """Queues rows that nobody has, and returns them; none if nothing is open or it is for others to take."""
        workers, num_undone = self._workers, self._num_undone()
        rows: list[int] = []
        if not self.is_done and (not workers.others or workers.rows_to_take(num_undone, num_undone)):
            rows, epoch = self._parts.take(lambda num_open: workers.rows_to_take(num_open, num_undone))
            self.queue.extend((index, epoch) for index in rows)
            self._num_fresh = len(rows)
        self._is_dry = not rows
        return rows

    def admits(self, index: int, epoch: int) -> bool:
        """Whether a row, whose turn has come, should be begun; one that should not is passed over."""
        if self._forecaster.fits(index):
            self._num_passed_in_turn = 0
            return True
        self._passed.append((index, epoch))
        self._num_passed_in_turn += 1
        return False

    @property
    def num_passed(self) -> int:
        """Rows that were passed over and have not had their turn again."""
        return len(self._passed)

    @property
    def is_closed(self) -> bool:
        """Whether rows that may end in time are no longer looked for."""
        return self._num_passed_in_turn >= _MAX_PASSED

    def return_to_passed(self) -> None:
        """Puts the first row that was passed over and fits now before all others."""
        for place, queued in enumerate(islice(self._passed, _MAX_LOOKED_AT)):
            if self._forecaster.fits(queued[0]):
                del self._passed[place]
                self._num_passed_in_turn = 0
                self.queue.appendleft(queued)
                return

    def look(self) -> None:
        """Decides what to give back, by what the forecaster was told of other workers."""
        workers, num_undone = self._workers, self._num_undone()
        finishers = workers.finishers(num_undone) if workers.others else []
        if finishers[:1] == [self._forecaster.worker]:
            self._stays = self._leases.acquire(_END) is not None
        self.is_done = bool(finishers) and self._forecaster.worker not in finishers
        self.is_done = self.is_done and self._leases.is_held_elsewhere(_END)
        if self.is_done:
            self.breaks = bool(self.queue) or self._forecaster.meter.rest_s > self._least_s
            return
        self._give(workers, num_undone)
        self.breaks = bool(
            self._is_dry
            and not self.queue
            and workers.others
            and len(self._forecaster.meter.running) < workers.own.num_slots
            and self._forecaster.meter.rest_s > 2 * self._least_s
            and workers.rows_to_take(num_undone, num_undone)
            and self._parts.num_open()
        )

    def leave_engine(self, running: Iterable[tuple[int, int]]) -> None:
        """Gives the engine's rows back if this worker is done, else queues them again; they are durable.

        running: rows and their epochs.
        """
        self.breaks, running = False, list(running)
        if self.is_done:
            self._parts.give_all()
            self.num_given += len(running) + len(self.queue)
            self.queue.clear()
            self._passed.clear()
            return
        self._num_fresh = min(self._num_fresh, len(self.queue))
        self.queue.extendleft(reversed(running))

    def _give(self, workers: Workers, num_undone: int) -> None:
        """Opens rows of the queue's end to those that have room."""
        num_fresh = min(self._num_fresh, len(self.queue))
        num_given = min(len(self.queue) - workers.rows_to_keep(len(self.queue), num_undone), num_fresh)
        if num_given < 1:
            return
        self._parts.give(self.queue[-num_given][0])
        for _ in range(num_given):
            self.queue.pop()
        self._num_fresh = num_fresh - num_given
        self.num_given += num_given

    @property
    def _workers(self) -> Workers:
        forecaster = self._forecaster
        how = {"mean": forecaster.mean, "least_s": self._least_s, "stays": self._stays}
        return Workers.of(forecaster.report(), forecaster.others, **how)
