"""Horizons: in how many forwards a launch goes on, by the times that launches were seen to take.

Each number of forwards is tried, and several are taken where each of them takes less time than one alone. All are tried
again from time to time, for a moment may have been a bad one.
"""

import itertools
import statistics
from collections.abc import Sequence

from ferrum_jax.core.plan import HORIZONS, MAX_HORIZON, Draw
from ferrum_jax.runtime.buckets import Ladder, LaunchBucket
from ferrum_jax.runtime.compile.worth import Saving
from ferrum_jax.runtime.programs import HORIZON_S, Executables

LOOK_EVERY = 16  # steps
_TRIED = 8  # launches, before their time is taken for known
_ANEW = 256  # looks until all are tried again
_MOST_S = 0.05  # of a launch: who comes or leaves waits for the one in flight and the one behind it
_GAIN = 0.97  # of the time of a forward, or less


class Horizons:
    """The horizons of one runner's launches."""

    def __init__(self, executables: Executables) -> None:
        self._executables, self._worth, self._num_looks = executables, executables.worth, 0

    def look(self, ladder: Ladder, alone: tuple[int, int] | None) -> Sequence[tuple[int, int, int]]:
        """Rows, `Draw` and forwards of launches in each bucket that is there; empty where all have one.

        alone: of `Scheduler`, for the steps since the last look, in which a missing launch would have saved time.
        """
        self._num_looks += 1
        if self._num_looks % _ANEW == 0:
            self._worth.times.clear()
        found = []
        for bucket, draw in itertools.product(ladder.for_steps(adapted=False, imaged=False), (Draw.GREEDY, Draw.PLAIN)):
            launch, rows = LaunchBucket(forward=bucket, draw=draw, horizon=MAX_HORIZON), bucket.num_tokens
            # a mixed bucket with fewer tokens than rows has steps of decodes too, which do not go on
            if bucket not in ladder.missing and (launch in ladder.launches or rows < bucket.num_rows):
                is_meant = alone is not None and draw == alone[1] and rows >= alone[0]
                best = self._best(launch, is_wanted=is_meant) if bucket.decode_only else 1
                found.append((rows, int(draw), best))
                alone = None if is_meant else alone
        return tuple(found) if any(horizon > 1 for _, _, horizon in found) else ()

    def _best(self, launch: LaunchBucket, *, is_wanted: bool) -> int:
        """Forwards of a launch, or the number whose time is not known yet."""
        known = dict[int, float]()
        for horizon in HORIZONS:
            if horizon > 1 and known[1] * horizon > _MOST_S:
                break
            if horizon > 1 and launch not in self._executables.launches:
                if is_wanted:
                    self._worth.want(launch, Saving(seconds=HORIZON_S * LOOK_EVERY))
                break
            times = tuple(self._worth.times.get((launch.forward, launch.draw, horizon), ()))
            if len(times) < _TRIED:
                return horizon
            known[horizon] = statistics.median(times)
        best = min(known, key=lambda horizon: known[horizon])
        return best if known[best] <= _GAIN * known[1] else 1
