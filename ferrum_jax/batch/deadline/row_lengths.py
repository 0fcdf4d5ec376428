"""How many tokens rows write of those that they may: Kaplan and Meier's estimate of rows that ended and rows that run.

A row that stopped by itself says how long rows are. One that reached its limit, or runs, says only that it is no
shorter. So rows in flight count from their first token on, and short rows, which end first, mislead nobody.

Source: E. L. Kaplan and P. Meier, Nonparametric Estimation from Incomplete Observations, 1958.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_MAX_ENDED = 4096  # the latest rows that ended
_MIN_AT_RISK = 4  # rows that have been as long, where anything is said of a length
_SURE = 20  # the longest row of many is longer than is said in one of so many cases


class Written(NamedTuple):
    """Tokens that rows write, or their share of those that they may: at the least, as expected, and at the most."""

    least: float = 1.0
    mean: float = 1.0
    most: float = 1.0


class RowLengths:
    """The lengths of a worker's rows, in tokens that they have written."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, float, bool]] = deque(maxlen=_MAX_ENDED)
        # lengths, the tokens of a mean row by each, and of rows, how many are longer; up to the longest that is known
        self._edges, self._tokens, self._alive = np.zeros(1), np.zeros(1), np.ones(1)
        self._rate = 0.0  # rows that stop, for each token

    def add(self, start: float, length: float, limit: float) -> None:
        """A row ended. start: the tokens that it had when it was begun here."""
        self._ended.append((start, length, length < limit))

    def look(self, running: Sequence[tuple[float, float]]) -> None:
        """Makes the estimate anew. running: the start and the tokens of each row that runs."""
        rows = np.array([*self._ended, *((*row, False) for row in running)], float).reshape(-1, 3)
        starts, lengths = np.sort(rows[:, 0]), np.sort(rows[:, 1])
        if len(rows) < _MIN_AT_RISK:
            return
        reach = lengths[-_MIN_AT_RISK]
        times, counts = np.unique(rows[(rows[:, 2] > 0) & (rows[:, 1] <= reach), 1], return_counts=True)
        at_risk = np.searchsorted(starts, times) - np.searchsorted(lengths, times)
        counts[at_risk < _MIN_AT_RISK] = 0
        alive = np.concatenate([[1.0], np.cumprod(1 - counts / np.maximum(at_risk, 1))])
        self._edges, self._alive = np.concatenate([[0.0], times, [reach]]), np.append(alive, alive[-1])
        self._tokens = np.concatenate([[0.0], np.cumsum(alive * np.diff(self._edges))])
        self._rate = float(rows[:, 2].sum() / max((rows[:, 1] - rows[:, 0]).sum(), 1e-9))

    def rest(self, written: np.ndarray, limits: np.ndarray) -> Written:
        """Tokens that rows will still write, all together. written, limits: [rows] tokens now, and at most."""
        reach, rate = self._edges[-1], max(self._rate, 1e-12)
        alive = np.maximum(self._alive[np.searchsorted(self._edges, written, side="right") - 1], 1e-9)
        seen = (np.interp(limits, self._edges, self._tokens) - np.interp(written, self._edges, self._tokens)) / alive
        longer = np.where(
            written < reach, self._alive[-1] / alive, 1.0
        )  # of these rows, how many pass all that is known
        beyond = np.maximum(limits - np.maximum(written, reach), 0.0)
        least, mean = float(seen.sum()), float((longer * -np.expm1(-beyond * rate) / rate).sum())
        return Written(least, least + mean, least + float((longer * beyond).sum()))

    def shares(self, limits: np.ndarray) -> Written:
        """The share of what rows with these limits may write that they do write."""
        whole = float(limits.sum())
        return Written(*(each / whole for each in self.rest(np.zeros(len(limits)), limits))) if whole else Written()

    def longest(self, num_rows: int) -> float:
        """Tokens of the longest of so many rows, at the most; infinite where none has stopped by itself."""
        if not self._rate:
            return math.inf
        more = math.log(max(_SURE * max(num_rows, 1) * self._alive[-1], 1.0))
        return float(self._edges[-1]) + more / self._rate
