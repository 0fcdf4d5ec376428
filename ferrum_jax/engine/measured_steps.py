"""MeasuredSteps: what steps take here, for the rule that decides how many drafted tokens a step computes.

Steps that compute a prompt are left out. A step's time runs from the end of the one before it, or from its own planning
if the engine had nothing to do, to its commit; so what the host does in between counts where the device waits for it. A
size that was never measured is taken to cost as its weights and tokens say.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ferrum_jax.core.scheduler.drafting import StepCosts
from ferrum_jax.runtime.buckets import Bucket, Ladder
from ferrum_jax.runtime.dispatched import InFlight

_KEPT = 7  # times of a size
_TOLD_EVERY, _FORGOTTEN_AFTER = 8, 512  # steps
_NEWS = 0.1  # of a time, before it is told again
_TOKENS_ON_CPU, _TOKENS_ON_ACCELERATORS = 16, 256  # whose arithmetic takes as long as reading the weights


class _Size(NamedTuple):
    """Rows of a step, rounded up to a power of two, and tokens of its bucket. has_drafts: else a row computes one."""

    num_rows: int
    num_tokens: int
    has_drafts: bool


class MeasuredSteps:
    """The steps of one engine."""

    def __init__(self, *, accelerator: bool) -> None:
        self._tokens_as_weights = _TOKENS_ON_ACCELERATORS if accelerator else _TOKENS_ON_CPU
        self._seconds: dict[_Size, deque[float]] = {}
        self._last: dict[_Size, int] = {}  # the step that was the last of it
        self._warm: set[Bucket] = set()  # the first step in a bucket loads its executable
        self._ended_s = 0.0
        self._num_steps = self._looked_at = 0
        self._told: tuple[StepCosts, ...] = ()

    def ended(self, step: InFlight, begun_s: float) -> None:
        """A step has just been committed. begun_s: of time.perf_counter(), when its planning began."""
        now_s, shards = time.perf_counter(), step.plan.shards
        seconds, self._ended_s = now_s - max(begun_s, self._ended_s), now_s
        self._num_steps += 1
        if any((shard.counts - shard.num_drafts > 1).any() for shard in shards):
            return
        rows = max(shard.num_rows for shard in shards)
        size = _Size(1 << (rows - 1).bit_length(), step.bucket.num_tokens, step.plan.has_drafts)
        if step.bucket in self._warm:
            self._seconds.setdefault(size, deque(maxlen=_KEPT)).append(seconds)
        self._warm.add(step.bucket)
        self._last[size] = self._num_steps

    def news(self, ladder: Ladder) -> tuple[StepCosts, ...] | None:
        """Times of steps of each compiled size, by rows, or None if they differ little from the last ones told."""
        if self._told and self._num_steps - self._looked_at < _TOLD_EVERY:
            return None
        self._looked_at = self._num_steps
        for size in [size for size, last in self._last.items() if self._num_steps - last > _FORGOTTEN_AFTER]:
            self._seconds.pop(size, None)  # it may have been a bad moment
            del self._last[size]
        buckets = [b for b in ladder.for_steps(adapted=False, imaged=False) if b not in ladder.missing]
        sizes = sorted({bucket.num_tokens for bucket in buckets if ladder.spreads or not bucket.decode_only})
        costs = tuple(self._costs(rows, buckets, sizes) for rows in sorted({size.num_rows for size in self._seconds}))
        if not costs:
            rows = buckets[-1].num_rows
            costs = (self._costs(rows, buckets, sizes),)
        if not _differ(costs, self._told):
            return None
        self._told = costs
        return costs

    def _costs(self, num_rows: int, buckets: Sequence[Bucket], sizes: Sequence[int]) -> StepCosts:
        bare = next(bucket.num_tokens for bucket in buckets if bucket.num_rows >= num_rows or bucket is buckets[-1])
        known = {size: statistics.median(seconds) for size, seconds in self._seconds.items()}

        def seconds(size: _Size) -> float:
            if size in known or not known:
                return known.get(size, self._weight(size))
            nearest = min(
                known, key=lambda other: (other.num_rows != num_rows, abs(other.num_tokens - size.num_tokens))
            )
            return known[nearest] * self._weight(size) / self._weight(nearest)

        drafted = tuple((tokens, seconds(_Size(num_rows, tokens, True))) for tokens in sizes if tokens >= num_rows)
        return StepCosts(num_rows=num_rows, bare=seconds(_Size(num_rows, bare, False)), sizes=drafted)

    def _weight(self, size: _Size) -> float:
        return 1 + size.num_tokens / self._tokens_as_weights


def _differ(costs: Sequence[StepCosts], told: Sequence[StepCosts]) -> bool:
    """Whether sizes came, or a time changed by enough to matter."""
    if [(c.num_rows, [tokens for tokens, _ in c.sizes]) for c in costs] != [
        (c.num_rows, [tokens for tokens, _ in c.sizes]) for c in told
    ]:
        return True
    times, before = ([s for c in of_rows for s in (c.bare, *(s for _, s in c.sizes))] for of_rows in (costs, told))
    return any(abs(a - b) > _NEWS * b for a, b in zip(times, before, strict=True))
