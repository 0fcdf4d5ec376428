"""The meter: what the tokens of a job's rows cost one worker in seconds, from when they are computed.

Tokens are counted as `Rows.tokens` has them: about what a row reads, and the most it may write. What rows write of that
is estimated apart (`row_lengths`); that prefixes are found in the cache is so in what a token costs. Prompts and
answers cost differently, and the rows that are left may not be as those that are done; so what each costs is fitted
to windows of time, near a ratio that is taken before anything is measured, and scaled so that the windows' whole time
comes out.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ferrum_jax.batch.deadline.row_lengths import RowLengths, Written

READ_TO_WRITE = 0.05  # what a token that is read costs beside one that is written, before it is measured
_MIN_WINDOWS = 4  # of time
_MIN_ROWS = 4
_PART_OF_WAVE = 0.1  # of the rows that run at once, how many have ended before anything is foreseen
_PRIOR_WEIGHT = 0.005
_MIN_SPREAD = 0.03
VARIATION = 0.5  # of what rows cost: the standard deviation, as a share of the mean
_FULL = 0.5  # of the most rows that ran: where fewer run, as at an end, their tokens cost more than others will
_ALIKE = 2.0  # windows that follow each other are slow together, and so say as little as a fourth of them would
_RECENT = 0.5  # what the seconds of rows before a look count beside those after it
_FORGOTTEN = 0.25  # what the first window counts beside the last


class Throughput(NamedTuple):
    """A worker's seconds for each token. spread: the standard error of a time that follows from it, as a share.

    write_s: of a token that is written. share: of the tokens that rows may write, those that they do.
    """

    read_s: float
    write_s: float
    spread: float
    num_rows: int  # that it was measured with
    least_share: float = 1.0
    share: float = 1.0
    most_share: float = 1.0

    @property
    def shares(self) -> Written:
        """The shares of the tokens that rows may write that they do write."""
        return Written(self.least_share, self.share, self.most_share)

    def seconds(self, reads: float, writes: float) -> float:
        """The time of rows that read and may write so many tokens."""
        return reads * self.read_s + writes * self.share * self.write_s


@dataclasses.dataclass(slots=True)
class _RowInFlight:
    """A row that runs. start, written: its tokens when it was begun here, and now. read: the share of its prompt."""

    began_s: float
    start: float
    written: float
    read: float = 0.0


class RowMeter:
    """Knows the throughput of one worker. tokens: [rows, 2] as of `Rows`. clock: any, in seconds."""

    def __init__(self, tokens: np.ndarray, clock: Callable[[], float], read_to_write: float = READ_TO_WRITE) -> None:
        self._tokens, self._clock, self._ratio = tokens, clock, read_to_write
        self._running: dict[int, _RowInFlight] = {}
        self._lengths, self._shares = RowLengths(), Written()
        self._reads = self._writes = 0.0  # of rows that run no more
        self._row_s = 0.0  # of rows that run no more
        self.max_running = 0
        self.num_ended = 0
        self._busy_s = 0.0
        self._looked_s: float | None = None
        self._last = np.zeros(3)  # busy seconds, tokens read and written at the end of the last window
        self._sums, self._products = np.zeros(3), np.zeros((3, 3))  # of windows, the later ones counting more
        self._num_windows = 0
        self._recent = np.zeros(3)  # seconds of rows that run, tokens that they write, and seconds

    # -- what happens ------------------------------------------------------------------------------------

    def begin(self, index: int, written: float = 0.0) -> None:
        """A row is given to the engine. written: tokens that it has from an earlier run."""
        now = self._clock()
        if not self._running:
            self._looked_s = now
        self._running[index] = _RowInFlight(now, written, written)
        self.max_running = max(self.max_running, len(self._running))

    def end(self, index: int, written: float | None = None) -> None:
        """A row is answered. written: its tokens; None where all that it may write are counted."""
        row = self._running.get(index)
        if row is None:
            return
        limit = float(self._tokens[index, 1])
        row.read, row.written = 1.0, limit if written is None else written
        self._lengths.add(row.start, row.written, limit)
        self.num_ended += 1
        self.drop(index)

    def drop(self, index: int) -> None:
        """A row failed, or is begun anew later: what was computed of it took its time all the same."""
        row = self._running.pop(index, None)
        if row is not None:
            self._reads += row.read * float(self._tokens[index, 0])
            self._writes += row.written - row.start
            self._row_s += self._clock() - row.began_s

    def note(self, progress: Mapping[int, tuple[float, float]]) -> None:
        """How far rows are: the share of the prompt that is computed, and the tokens written. Others count when they
        end."""
        for index, (read, written) in progress.items():
            if (row := self._running.get(index)) is not None:
                row.read, row.written = read, max(row.start, written)

    def look(self, limits: np.ndarray, *, is_held: bool = False) -> None:
        """Takes a sample, where rows run. limits: [rows left] tokens that each may write. is_held: whether rows wait
        that might not end in time; tokens would cost less beside them."""
        now = self._clock()
        if self._looked_s is not None:
            self._busy_s += now - self._looked_s
        self._looked_s = now if self._running else None
        self._lengths.look([(row.start, row.written) for row in self._running.values() if row.read])
        self._shares = self._lengths.shares(limits)
        shows_progress = any(row.read for row in self._running.values())
        if not shows_progress and self.num_ended < max(len(self._running), _MIN_ROWS):
            return  # the first rows began together, and so end together: they do not show how soon others follow
        end = np.array([self._busy_s, *self._computed])
        window, self._last = np.maximum(end - self._last, 0.0), end
        if shows_progress:
            self._recent += window[0] * len(self._running), window[1] * self._ratio + window[2], window[0]
            self._recent *= _RECENT
            is_held |= len(self._running) < _FULL * self.max_running
        if window.any() and not is_held:
            kept = _FORGOTTEN ** (window[0] / max(self._busy_s, 1e-9))
            self._sums = kept * self._sums + window
            self._products = kept * self._products + np.outer(window, window)
            self._num_windows += 1

    # -- what is known -----------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The rows that the engine has."""
        return list(self._running)

    @property
    def under_way(self) -> tuple[float, float]:
        """Finished work of the running rows: tokens read and written, in earlier runs too."""
        rows = self._running.items()
        reads = sum(row.read * float(self._tokens[index, 0]) for index, row in rows)
        return reads, sum(row.written for _, row in rows)

    @property
    def rest(self) -> tuple[float, Written]:
        """Remaining work of the running rows: tokens to read, and to write."""
        rows = self._running.items()
        reads = sum((1 - row.read) * float(self._tokens[index, 0]) for index, row in rows)
        written = np.array([row.written for _, row in rows], float)
        return reads, self._lengths.rest(written, self._tokens[self.running, 1].astype(float))

    @property
    def num_written(self) -> float:
        """Tokens that this worker has written."""
        return self._computed[1]

    @property
    def _computed(self) -> tuple[float, float]:
        """Tokens read and written by this worker."""
        reads, writes = self.under_way
        return self._reads + reads, self._writes + writes - sum(row.start for row in self._running.values())

    def _lately(self) -> Sequence[float]:
        """Seconds of rows, what they computed, and seconds: the latest where progress is known, else of all the run."""
        if self._recent[1]:
            return self._recent.tolist()
        reads, writes = self._computed
        row_s = self._row_s + sum(self._clock() - row.began_s for row in self._running.values())
        return row_s, reads * self._ratio + writes, self._busy_s

    def row_s(self, tokens: Sequence[float]) -> float:
        """How long a row takes that reads and may write so many tokens; 0 before anything is computed."""
        row_s, weight, _ = self._lately()
        return self._weight(tokens) * row_s / weight if weight else 0.0

    def rows_a_second(self, tokens: Sequence[float]) -> float:
        """How many rows that read and may write so many tokens this worker does in a second; 0 if unknown."""
        _, weight, busy_s = self._lately()
        return weight / (max(self._weight(tokens), 1e-9) * busy_s) if busy_s else 0.0

    @property
    def rest_s(self) -> float:
        """How long the rows that run take yet: the longest of them."""
        return max((self._rest_of(index, row) for index, row in self._running.items()), default=0.0)

    def _rest_of(self, index: int, row: _RowInFlight) -> float:
        """Seconds that a row takes yet. A row whose progress is not known is judged by the time that it has run."""
        reads, writes = self._tokens[index].tolist()
        if not row.read:
            return max(self.row_s((reads, writes)) - self._clock() + row.began_s, 0.0)
        return self.row_s((reads * (1 - row.read), max(writes - row.written, 0)))

    def last_s(self, throughput: Throughput, limit: float) -> float:
        """How long the last row takes yet, at the most: one that is begun last, or if none is, of those that run.

        limit: tokens that a row which is not begun may write at the most; 0 where all are.
        """
        longest = self._lengths.longest(self.max_running)
        left = [min(longest, limit)]
        left += [
            max(min(longest, float(self._tokens[index, 1])) - row.written, 1.0) for index, row in self._running.items()
        ]
        return max(left) * throughput.write_s * self.max_running

    @property
    def throughput(self) -> Throughput | None:
        """The seconds for each token; None before enough rows have ended."""
        least = max(_MIN_ROWS, math.ceil(_PART_OF_WAVE * self.max_running))
        if self.num_ended < least or not self._num_windows:
            return None
        spread = math.hypot(_MIN_SPREAD, VARIATION / math.sqrt(self.num_ended))
        read_s, write_s = cost = self._fitted()
        if self._num_windows >= _MIN_WINDOWS:
            rest = np.array([1.0, *np.negative(cost)])  # of a window's seconds, what its tokens do not explain
            of_windows = math.sqrt(max(float(rest @ self._products @ rest), 0.0)) / max(float(self._sums[0]), 1e-9)
            spread = math.hypot(spread, _ALIKE * of_windows)
        else:
            spread = 2 * spread
        return Throughput(read_s, write_s, spread, self.num_ended, *self._shares)

    def _fitted(self) -> tuple[float, float]:
        """Least squares over windows, near the ratio; then scaled to the whole time."""
        left, right = self._products[1:, 1:], self._products[1:, 0]
        scale = np.maximum(np.diag(left), 1e-12)
        prior = _PRIOR_WEIGHT * (scale[0] if scale[0] > 1e-9 else scale[1] / self._ratio**2)
        near = np.array([1.0, -self._ratio])
        left = left + prior * np.outer(near, near) + 1e-9 * np.diag(scale)
        cost = np.maximum(np.linalg.solve(left, right), 0.0)
        if not cost.any():
            cost = np.array([self._ratio, 1.0])
        cost *= float(self._sums[0]) / max(float(self._sums[1:] @ cost), 1e-12)
        return float(cost[0]), float(cost[1])

    def _weight(self, tokens: Sequence[float]) -> float:
        """Tokens that a row is expected to write, and those that it reads for what they cost beside these."""
        return float(tokens[0] * self._ratio + tokens[1] * self._shares.mean)
