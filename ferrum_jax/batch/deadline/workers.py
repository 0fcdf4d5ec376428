"""The workers: what each of unlike workers should have of a job, by their throughputs.

    a worker's rate  /  the rates of all  *  the rows that are open  /  2  =  the rows that it takes next

So parts last about equally long at each worker, and become shorter towards the end. Every worker reckons alike from
what all of them wrote of themselves; where they differ, because one has read older throughputs, the leases still hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ferrum_jax.batch.deadline.forecaster import WorkerReport

_TAKEN = 0.5  # of a worker's share of the open rows, at once
_MIN_USED = 0.5  # of its slots, by a worker that has room for more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """A worker and those others that are at work and have a throughput.

    mean: tokens, read and written, of a row of the job. least_s: a part lasts as long at least. stays: others leave the
    last rows to this worker.
    """

    own: WorkerReport
    others: Sequence[WorkerReport]
    mean: tuple[float, float]
    least_s: float
    stays: bool = False

    @staticmethod
    def of(own: WorkerReport, others: Sequence[WorkerReport], **more: Any) -> Workers:
        """The workers among all workers that were ever heard of. more: the other fields."""
        measured = [each for each in others if each.is_alive and each.throughput is not None]
        return Workers(own=own, others=measured, **more)

    def rate(self, worker: WorkerReport) -> float:
        """Rows a second, by those that run before its throughput is known; 0 before anything is computed."""
        if worker.throughput is None:
            return worker.num_running / worker.row_s if worker.row_s else 0.0
        return 1 / max(worker.throughput.seconds(*self.mean), 1e-9)

    def rows_to_take(self, num_open: int, num_undone: int) -> int:
        """How many of the open rows this worker should take next."""
        if not self.others:
            return num_open
        if self.own.throughput is None:
            return max(math.ceil(_TAKEN * num_open / (1 + len(self.others))), 1)
        if not self.is_worthwhile(num_undone):
            return 0
        rate = self.rate(self.own)
        return max(math.ceil(_TAKEN * num_open * rate / (rate + self._rate_of_others)), math.ceil(self.least_s * rate))

    def rows_to_keep(self, num_queued: int, num_undone: int) -> int:
        """How many of the rows that it has and has not begun this worker should keep, as others have room."""
        rates = [self.rate(each) for each in self.others if has_room(each)]
        rate = self.rate(self.own)
        if not rates or not rate:
            return num_queued
        kept = math.floor(num_queued * rate / (rate + sum(rates))) if self.is_worthwhile(num_undone) else 0
        return kept if num_queued - kept >= self.least_s * rate else num_queued

    def is_worthwhile(self, num_undone: int) -> bool:
        """Whether a row that this worker begins would end about as soon as the others are done with all of them."""
        if self.stays or not self.others:
            return True
        others_s = num_undone / max(self._rate_of_others, 1e-9) + min(each.row_s for each in self.others)
        return self.own.row_s <= others_s + self.least_s

    def finishers(self, num_undone: int) -> list[str]:
        """The fewest workers, the fastest first, that can run all these rows at once; none if even all cannot."""
        if not self.rate(self.own):
            return []
        found, num_slots = list[str](), 0
        for worker in sorted([self.own, *self.others], key=lambda each: (-self.rate(each), each.worker)):
            found.append(worker.worker)
            num_slots += worker.num_slots
            if num_slots >= num_undone:
                return found
        return []

    @property
    def _rate_of_others(self) -> float:
        return sum(map(self.rate, self.others))


def has_room(worker: WorkerReport) -> bool:
    """Whether a worker could begin rows now."""
    return not worker.num_queued and worker.num_running <= _MIN_USED * worker.num_slots
