"""Worth: what executables that are not there would have saved, and what those that came while steps ran have saved.

A step takes seconds for itself and seconds for each of its tokens, both measured. A smaller bucket saves tokens of
padding, a larger one saves steps. Where only one size of step was measured, all of its time counts as its tokens'.
"""

from __future__ import annotations

import dataclasses
import operator
import threading
import time
from collections import deque
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Saving(NamedTuple):
    """A saving, in tokens that are not computed, steps that are not needed, and seconds beside."""

    tokens: float = 0
    steps: float = 0
    seconds: float = 0

    def plus(self, other: Saving) -> Saving:
        return Saving(*map(operator.add, self, other))


@dataclasses.dataclass(kw_only=True)
class Came:
    """An executable that was compiled while steps ran. began_s: of time.monotonic(). saves: in each step with it."""

    began_s: float
    seconds: float
    saves: Saving
    num_steps: int = 0


class Worth:
    """Counted by the thread that runs steps, read by the one that compiles."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.wanted: dict[Hashable, Saving] = {}
        self.came: dict[Hashable, Came] = {}
        self._lock = threading.Lock()
        self._seconds: dict[int, tuple[float, int]] = {}  # by tokens of a step: of all such steps, and how many
        self._done_s = 0.0
        self.times: dict[Hashable, deque[float]] = {}  # seconds of a turn, the last ones, by kind of step
        self._last: Hashable = None

    def done(self, num_tokens: int, dispatched_s: float, kind: Hashable = None, num_turns: int = 1) -> None:
        """A step has just ended. The device began it when the one before it ended.

        num_tokens: with padding, in each of its turns. kind: for whose last turns there are `times`.
        """
        now_s = time.perf_counter()
        took_s, self._done_s = (now_s - max(dispatched_s, self._done_s)) / num_turns, now_s
        seconds, count = self._seconds.get(num_tokens, (0.0, 0))
        self._seconds[num_tokens] = seconds + took_s, count + 1
        if kind == self._last:  # else its time has some of another's
            self.times.setdefault(kind, deque(maxlen=15)).append(took_s)
        self._last = kind

    def want(self, part: Hashable, saving: Saving) -> None:
        """A step has just run that would have saved so much."""
        with self._lock:
            self.wanted[part] = self.wanted.get(part, Saving()).plus(saving)

    def ran(self, part: Hashable) -> None:
        """A step has just run in this bucket."""
        if (came := self.came.get(part)) is not None:
            came.num_steps += 1

    def add(self, part: Hashable, came: Came) -> None:
        """Records a finished compile and counts anew, for steps may take other buckets now."""
        with self._lock:
            self.came[part] = came
            self.wanted.clear()

    def seconds(self, saving: Saving) -> float:
        """The seconds that a saving is worth, by the steps so far."""
        own, of_token = self._fit()
        return own * saving.steps + of_token * saving.tokens + saving.seconds

    def most_wanted(self, parts: Collection[Key]) -> tuple[Key | None, float]:
        """The part that would have saved most so far, and its seconds; None if no step wanted a part."""
        with self._lock:
            wanted = dict(self.wanted)
        found = [(part, self.seconds(wanted[part])) for part in parts if part in wanted]
        return max(found, key=lambda each: each[1], default=(None, 0.0))

    def report(self) -> list[dict[str, Any]]:
        """For each executable that came: what it is, when, what it took and what it has saved, in seconds."""
        return [
            {
                "what": str(part),
                "began_s": round(came.began_s - self.began_s, 3),
                "seconds": round(came.seconds, 3),
                "saved_s": round(came.num_steps * self.seconds(came.saves), 3),
            }
            for part, came in dict(self.came).items()
        ]

    def _fit(self) -> tuple[float, float]:
        """Fits seconds = a + b * tokens to the steps so far by least squares; gives a and b, neither below 0."""
        means = [(tokens, seconds / count, count) for tokens, (seconds, count) in dict(self._seconds).items()]
        if not means:
            return 0.0, 0.0
        total = sum(count for *_, count in means)
        x, y = (sum(each[i] * each[2] for each in means) / total for i in (0, 1))
        spread = sum(count * (tokens - x) ** 2 for tokens, _, count in means)
        if not spread:
            return 0.0, y / x
        slope = sum(count * (tokens - x) * (mean - y) for tokens, mean, count in means) / spread
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope
