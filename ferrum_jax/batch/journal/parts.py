"""Parts: which rows of a job a worker has, and which are open to it.

A job's rows lie in parts that follow from its input alone. A lease of a part may be cut: its worker keeps the rows
before a place, and those from there on are a part of their own, named `NUMBER-PLACE`, whose epochs go on where the cut
was made. So a part is an interval, its leases and those of what was cut off say whose each row is, and the later of two
leases of a row has the greater epoch. Every change is one exclusive creation of a part's next epoch: a worker that
slept, and was taken for dead, finds it there and has cut nothing off.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.batch.journal.leases import Leases


class JobPart(NamedTuple):
    """The rows at places `first` to `end` of a part of the input. epoch: of its newest lease."""

    number: int
    first: int
    end: int
    epoch: int

    @property
    def name(self) -> str:
        return f"{self.number}-{self.first}" if self.first else str(self.number)


class JobParts:
    """The parts of a job, for one worker."""

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        leases: Leases,
        *,
        unfinished: Callable[[np.ndarray], np.ndarray],
        refresh: Callable[[], None],
    ) -> None:
        """parts: the rows of each. unfinished: which of some rows have no line, as known since the last refresh."""
        self._parts, self._leases, self._unfinished, self._refresh = parts, leases, unfinished, refresh
        self._held: dict[str, JobPart] = {}
        self._last: JobPart | None = None  # the part that was taken last

    def num_open(self) -> int:
        """Unfinished rows that no living worker has."""
        return sum(len(places) for _, _, places in self._open())

    def take(self, most: Callable[[int], int]) -> tuple[list[int], int]:
        """The unfinished rows of an open part, now this worker's, and their epoch; none if nothing is open.

        most: how many to take where so many are open; the rest of the part stays open.
        """
        found = list(self._open())
        num_open = sum(len(places) for _, _, places in found)
        for part, is_own, places in found:
            num = most(num_open)
            if num < 1:
                break
            if not is_own:
                cut = int(places[num]) if num < len(places) else None
                if not self._leases.advance(part.name, part.epoch + 1, cut=cut):
                    continue
                part = part._replace(end=part.end if cut is None else cut, epoch=part.epoch + 1)
            self._held[part.name] = self._last = part
            self._refresh()
            if rows := self._unfinished(self._rows(part)).tolist():
                return rows, part.epoch
        return [], 0

    def give(self, index: int) -> None:
        """Opens the part that was taken last from this row on. Raises LeaseLost if another worker has it."""
        assert self._last is not None, "no part was taken"
        part = self._last
        place = part.first + int(np.flatnonzero(self._rows(part) == index)[0])
        if place == part.first:
            self._give_back(part)
            return
        self._leases.give(part.name, part.epoch + 1, cut=place)
        self._held[part.name] = self._last = part._replace(end=place, epoch=part.epoch + 1)

    def give_all(self) -> None:
        """Opens every part that has unfinished rows. Raises LeaseLost if another worker has one of them."""
        for part in list(self._held.values()):
            if len(self._unfinished(self._rows(part))):
                self._give_back(part)

    def _give_back(self, part: JobPart) -> None:
        self._leases.give(part.name, part.epoch + 1)
        del self._held[part.name]

    def _rows(self, part: JobPart) -> np.ndarray:
        return self._parts[part.number][part.first : part.end]

    def _open(self) -> Iterator[tuple[JobPart, bool, np.ndarray]]:
        """Parts with unfinished rows that no living worker has, whether this worker has it unknowingly, and the places
        of those rows."""
        epochs, lives = self._leases.epochs(), dict[str, bool]()
        for number, rows in enumerate(self._parts):
            if not len(self._unfinished(rows)):
                continue
            for part, worker in self._intervals(number, epochs):
                here = self._rows(part)
                undone = self._unfinished(here)
                if not len(undone) or part.name in self._held:
                    continue
                is_own = worker == self._leases.worker  # the answer of the store was lost
                if not is_own and worker not in lives:
                    lives[worker] = self._leases.lives(worker)
                if is_own or not lives[worker]:
                    yield part, is_own, part.first + np.flatnonzero(np.isin(here, undone))

    def _intervals(self, number: int, epochs: dict[str, list[int]]) -> Iterator[tuple[JobPart, str]]:
        """The parts that a part of the input was cut into, in order, each with its worker."""
        todo = [JobPart(number, 0, len(self._parts[number]), 0)]
        while todo:
            part, worker = todo.pop(), ""
            for epoch in sorted(epochs.get(part.name, ())):
                worker, cut = self._leases.lease(part.name, epoch)
                if cut is not None and part.first < cut < part.end:
                    todo.append(JobPart(number, cut, part.end, epoch))
                    part = part._replace(end=cut)
                part = part._replace(epoch=epoch)
            yield part, worker
