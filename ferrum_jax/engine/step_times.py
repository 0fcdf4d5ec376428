"""StepTimes: what steps take here, for the rule that decides how many drafted tokens a step computes.

Steps that compute a prompt are left out. A step's time runs from the end of the one before it, or from its own planning
if the engine had nothing to do, to its commit; so what the host does in between counts where the device waits for it. A
size of which nothing is known yet is taken to cost as its weights and tokens say.
"""

from __future__ import annotations

import statistics
import time
from collections import deque

from ferrum_jax.runtime.buckets import Bucket, Ladder
from ferrum_jax.runtime.runner import InFlight
from ferrum_jax.scheduling.drafting import StepCosts

_KEPT = 7  # times of a size
_TOLD_EVERY, _FORGOTTEN_AFTER = 8, 512  # steps
_NEWS = 0.1  # of a time, before it is told again
_TOKENS_ON_CPU, _TOKENS_ON_ACCELERATORS = 16, 256  # whose arithmetic takes as long as reading the weights


class StepTimes:
    """The steps of one engine."""

    def __init__(self, *, accelerator: bool) -> None:
        self._tokens_as_weights = _TOKENS_ON_ACCELERATORS if accelerator else _TOKENS_ON_CPU
        self._seconds: dict[Bucket, deque[float]] = {}
        self._last: dict[Bucket, int] = {}  # the step that was the last in it
        self._warm: set[Bucket] = set()  # the first step in a bucket loads its executable
        self._ended_s = 0.0
        self._num_steps = 0
        self._told = StepCosts(decode=(), mixed=())
        self._looked_at = -_TOLD_EVERY

    def ended(self, step: InFlight, begun_s: float) -> None:
        """A step has just been committed. begun_s: of time.perf_counter(), when its planning began."""
        now_s = time.perf_counter()
        seconds, self._ended_s = now_s - max(begun_s, self._ended_s), now_s
        self._num_steps += 1
        bucket = step.bucket
        if any((shard.counts - shard.num_drafts > 1).any() for shard in step.plan.shards):
            return
        if bucket in self._warm:
            self._seconds.setdefault(bucket, deque(maxlen=_KEPT)).append(seconds)
        self._warm.add(bucket)
        self._last[bucket] = self._num_steps

    def news(self, ladder: Ladder) -> StepCosts | None:
        """What steps of each size that is there take, where that is not what was told before; else None."""
        if self._num_steps - self._looked_at < _TOLD_EVERY:
            return None
        self._looked_at = self._num_steps
        for bucket in [b for b, last in self._last.items() if self._num_steps - last > _FORGOTTEN_AFTER]:
            self._seconds.pop(bucket, None)  # it may have been a bad moment
            del self._last[bucket]
        there = [bucket for bucket in ladder.for_steps(adapted=False, imaged=False) if bucket not in ladder.missing]
        made: dict[bool, list[tuple[int, float]]] = {True: [], False: []}
        for bucket in there:
            made[bucket.decode_only].append((bucket.num_tokens, self._seconds_of(bucket)))
        costs = StepCosts(decode=tuple(made[True]), mixed=tuple(made[False]))
        if not _differ(costs, self._told):
            return None
        self._told = costs
        return costs

    def _seconds_of(self, bucket: Bucket) -> float:
        known = {b: statistics.median(seconds) for b, seconds in self._seconds.items()}
        if bucket in known or not known:
            return known.get(bucket, self._weight(bucket))
        nearest = min(known, key=lambda other: (abs(other.num_tokens - bucket.num_tokens), other))
        return known[nearest] * self._weight(bucket) / self._weight(nearest)

    def _weight(self, bucket: Bucket) -> float:
        return 1 + bucket.num_tokens / self._tokens_as_weights


def _differ(costs: StepCosts, told: StepCosts) -> bool:
    """Whether sizes came, or a time changed by enough to matter."""
    pairs = [(costs.decode, told.decode), (costs.mixed, told.mixed)]
    if any([size for size, _ in new] != [size for size, _ in old] for new, old in pairs):
        return True
    times = [(a, b) for new, old in pairs for (_, a), (_, b) in zip(new, old, strict=True)]
    return any(abs(a - b) > _NEWS * b for a, b in times)
