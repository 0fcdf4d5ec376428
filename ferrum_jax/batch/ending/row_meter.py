"""The meter: what the tokens of a job's rows cost one worker in seconds, from when its rows began and ended.

Tokens are counted as `Rows.tokens` has them: about what a row reads, and the most it may write. That rows end before
they have written all of it, and that prefixes are found in the cache, is so in what a token costs. Prompts and
answers cost differently, and the rows that are left may not be as those that are done; so what each costs is fitted
to windows of time, near a ratio that is taken before anything is measured, and scaled so that the windows' whole time
comes out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

READ_TO_WRITE = 0.05  # what a token that is read costs beside one that is written, before it is measured
_MOST_SAMPLES = 32
_LEAST_WINDOWS = 4
_PRIOR_WEIGHT = 0.05
_LEAST_SPREAD = 0.03
_LEAST_VARIATION = 0.4  # of what rows cost: the standard deviation, as a share of the mean
_MOST_DONE = 0.95  # of a row that has not ended


class TokenPace(NamedTuple):
    """What tokens cost a worker. spread: the standard error of a time that follows from it, as a share."""

    read_s: float
    write_s: float
    spread: float
    num_rows: int  # that it was measured with

    def seconds(self, reads: float, writes: float) -> float:
        """The time of so many tokens."""
        return reads * self.read_s + writes * self.write_s


class RowMeter:
    """Knows the pace of one worker. Times are those of any clock; tokens: [rows, 2] as of `Rows`."""

    def __init__(self, tokens: np.ndarray, read_to_write: float = READ_TO_WRITE) -> None:
        self._tokens, self._ratio = tokens, read_to_write
        self._running: dict[int, float] = {}  # by index: when it began
        self._reads = self._writes = 0.0  # of rows that ended
        self._row_s = self._row_weight = 0.0  # of rows that ended
        self._rates = self._squares = 0.0  # of their seconds for their weights: the sum, and that of squares
        self.num_ended = 0
        self._busy_s = 0.0
        self._looked_s: float | None = None
        self._samples: list[tuple[float, float, float]] = []  # busy seconds, tokens read and written by then

    # -- what happens ------------------------------------------------------------------------------------

    def begin(self, index: int, now: float) -> None:
        """A row is given to the engine."""
        if not self._running:
            self._looked_s = now
        self._running[index] = now

    def end(self, index: int, now: float) -> None:
        """A row is answered."""
        began = self._running.pop(index, None)
        if began is None:
            return
        reads, writes = self._of(index)
        self._reads, self._writes = self._reads + reads, self._writes + writes
        self._row_s, self._row_weight = self._row_s + now - began, self._row_weight + self._weight(index)
        rate = (now - began) / max(self._weight(index), 1e-9)
        self._rates, self._squares = self._rates + rate, self._squares + rate**2
        self.num_ended += 1

    def drop(self, index: int) -> None:
        """A row failed, or is begun anew later; what it took counts for nothing."""
        self._running.pop(index, None)

    def look(self, now: float) -> None:
        """Takes a sample, where rows run."""
        if self._looked_s is not None:
            self._busy_s += now - self._looked_s
        self._looked_s = now if self._running else None
        if self.num_ended < max(len(self._running), _LEAST_WINDOWS):
            return  # the first rows began together, and so end together: they do not show how soon others follow
        reads, writes = self.under_way(now)
        self._samples.append((self._busy_s, self._reads + reads, self._writes + writes))
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[1::2]

    # -- what is known -----------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The rows that the engine has."""
        return list(self._running)

    def under_way(self, now: float) -> tuple[float, float]:
        """What is done of the rows that run: tokens read and written, estimated.

        Less counts as done the more rows differ in what they take: a row that may end at any moment is as far from its
        end as when it began.
        """
        found, weight_s = np.zeros(2), self._weight_s(now)
        for index, began in self._running.items():
            whole = self._weight(index) * weight_s
            found += self._tokens[index] * (min((now - began) / whole, _MOST_DONE) if whole else 0.0)
        found *= max(1 - self._variation, 0.0)
        return float(found[0]), float(found[1])

    @property
    def _variation(self) -> float:
        """The variance of what rows take for their weight, over the square of its mean."""
        if not self._rates:
            return 0.0
        return max(self.num_ended * self._squares / self._rates**2 - 1, 0.0)

    def row_s(self, index: int, now: float) -> float:
        """How long a row takes from its beginning to its end; 0 before any has ended."""
        return self._weight(index) * self._weight_s(now)

    def like_row_s(self, tokens: tuple[float, float], now: float) -> float:
        """How long a row takes that reads and may write so many tokens; 0 before any has ended."""
        return (tokens[0] * self._ratio + tokens[1]) * self._weight_s(now)

    def strangeness(self, tokens: tuple[float, float]) -> float:
        """How much longer or shorter such a row is than those that ended here: the logarithm of its share of the mean.

        tokens: that it reads and may write.
        """
        if not self.num_ended or not any(tokens):
            return 0.0
        mean = self._row_weight / self.num_ended
        return abs(math.log((tokens[0] * self._ratio + tokens[1]) / max(mean, 1e-9)))

    def rest_s(self, now: float) -> float:
        """How long the rows that run take yet: the longest of them."""
        weight_s = self._weight_s(now)
        left = (self._weight(index) * weight_s - now + began for index, began in self._running.items())
        return max(left, default=0.0)

    def pace(self, now: float) -> TokenPace | None:
        """What tokens cost; None before enough rows have ended."""
        if self.num_ended < _LEAST_WINDOWS or not self._busy_s:
            return None
        variation = max(_LEAST_VARIATION, math.sqrt(self._variation))
        spread = math.hypot(_LEAST_SPREAD, variation / math.sqrt(self.num_ended))
        if len(self._samples) > _LEAST_WINDOWS:
            return self._fitted(spread)
        reads, writes = self.under_way(now)
        weight = (self._reads + reads) * self._ratio + self._writes + writes
        write_s = self._busy_s / weight
        return TokenPace(write_s * self._ratio, write_s, 2 * spread, self.num_ended)

    def _fitted(self, spread: float) -> TokenPace:
        """Least squares over windows, the later ones counting more, near the ratio; then scaled to the whole time."""
        samples = np.asarray(self._samples)
        windows = np.diff(samples, axis=0)  # [windows, 3]: seconds, tokens read, tokens written
        age = (samples[-1, 0] - samples[1:, 0]) / max(samples[-1, 0] - samples[0, 0], 1e-9)
        weights = 0.25**age
        seconds, tokens = windows[:, 0], windows[:, 1:]
        scale = np.maximum((weights @ tokens**2), 1e-12)
        prior = _PRIOR_WEIGHT * (scale[0] if scale[0] > 1e-9 else scale[1] / self._ratio**2)
        near = np.array([1.0, -self._ratio])
        left = (tokens.T * weights) @ tokens + prior * np.outer(near, near) + 1e-9 * np.diag(scale)
        cost = np.maximum(np.linalg.solve(left, (tokens.T * weights) @ seconds), 0.0)
        if not cost.any():
            cost = np.array([self._ratio, 1.0])
        cost *= float(weights @ seconds) / max(float(weights @ (tokens @ cost)), 1e-12)
        return TokenPace(float(cost[0]), float(cost[1]), spread, self.num_ended)

    def _of(self, index: int) -> tuple[float, float]:
        reads, writes = self._tokens[index].tolist()
        return float(reads), float(writes)

    def _weight(self, index: int) -> float:
        reads, writes = self._of(index)
        return reads * self._ratio + writes

    def _weight_s(self, now: float) -> float:
        """Seconds of a row for its weight: what rows took that ended and those that run, over those that ended."""
        if not self._row_weight:
            return 0.0
        return (self._row_s + sum(now - began for began in self._running.values())) / self._row_weight
