"""Horizons: in how many forwards a launch goes on, by the times that launches were seen to take.

Each number of forwards is tried, and one beyond a single forward is taken where its time for each of them is less. All
are tried again from time to time, for a moment may have been a bad one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ferrum_jax.core.plan import HORIZONS, MAX_HORIZON, Draw
from ferrum_jax.runtime.buckets import Bucket, Ladder, LaunchBucket
from ferrum_jax.runtime.compile.worth import Saving
from ferrum_jax.runtime.programs import HORIZON_S, Executables

LOOK_EVERY = 16  # calls of a step
_TRIED = 8  # launches, before their time is taken for known
_ANEW = 256  # looks until all are tried again
_MOST_S = 0.05  # of a launch: who comes or leaves waits for the one in flight and the one behind it
_GAIN = 0.97  # of the time of a forward, or less


class Horizons:
    """The horizons of one runner's launches."""

    def __init__(self, executables: Executables) -> None:
        self._executables, self._num_looks = executables, 0

    def look(self, ladder: Ladder, alone: tuple[int, int] | None) -> Sequence[tuple[int, int, int]]:
        """Rows, `Draw` and forwards of launches in each bucket that is there; empty where all have one.

        alone: of `Scheduler`, which the steps since the last look are taken to have been like.
        """
        self._num_looks += 1
        if self._num_looks % _ANEW == 0:
            self._executables.worth.times.clear()
        if not ladder.goes_on:
            return ()
        buckets = [
            b for b in ladder.for_steps(adapted=False, imaged=False) if b.decode_only and b not in ladder.missing
        ]
        if alone is not None:
            self._want(next((bucket for bucket in buckets if bucket.num_rows >= alone[0]), None), Draw(alone[1]))
        found = [(b.num_rows, int(draw), self._best(b, draw)) for b in buckets for draw in (Draw.GREEDY, Draw.PLAIN)]
        return tuple(found) if any(horizon > 1 for _, _, horizon in found) else ()

    def _time(self, bucket: Bucket, draw: Draw, horizon: int) -> float | None:
        """Seconds of a forward in launches of this many; None where too few were seen."""
        times = tuple(self._executables.worth.times.get((bucket, draw, horizon), ()))
        return statistics.median(times) if len(times) >= _TRIED else None

    def _want(self, bucket: Bucket | None, draw: Draw) -> None:
        """Counts what launches with a horizon, if they are missing, would have saved since the last look."""
        if bucket is None or (launch := LaunchBucket(forward=bucket, draw=draw, horizon=MAX_HORIZON)) in (
            self._executables.launches
        ):
            return
        time = self._time(bucket, draw, 1)
        if time is not None and time * HORIZONS[1] <= _MOST_S:
            self._executables.worth.want(launch, Saving(seconds=HORIZON_S * LOOK_EVERY))

    def _best(self, bucket: Bucket, draw: Draw) -> int:
        if LaunchBucket(forward=bucket, draw=draw, horizon=MAX_HORIZON) not in self._executables.launches:
            return 1
        known: dict[int, float] = {}
        for horizon in HORIZONS:
            if horizon > 1 and known[1] * horizon > _MOST_S:
                break
            time = self._time(bucket, draw, horizon)
            if time is None:
                return horizon
            known[horizon] = time
        best = min(known, key=lambda horizon: known[horizon])
        return best if known[best] <= _GAIN * known[1] else 1
