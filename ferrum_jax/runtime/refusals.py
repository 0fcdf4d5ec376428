"""Buckets that do not fit a target: refused before anything is compiled, with the changes that would fit."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

from ferrum_jax.runtime.buckets import Ladder
from ferrum_jax.runtime.step import StepOptions, attention_config
from pallas_kernels.kv_pool import KVPool

_LARGEST_BLOCK = 256  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings that buckets follow from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int


def refuse_buckets(
    limits: Limits,
    options: StepOptions,
    ladder_of: Callable[[Limits], Ladder],
    pools_of: Callable[[Limits], list[tuple[KVPool, int]]],
) -> None:
    """Raises ValueError with the reason why attention of a bucket does not fit the target, of the largest such.

    pools_of: of a layer of each cache group the shapes of its pool on one device, and its query heads.
    """

    def check(limits: Limits) -> None:
        pools, own = pools_of(limits), dataclasses.replace(options, block_size=limits.block_size)
        for bucket in reversed(ladder_of(limits).buckets):
            try:
                for pool, num_heads in pools:
                    attention_config(bucket, own, pool, num_heads)
            except ValueError as error:
                raise ValueError(f"the bucket {bucket} cannot run with {own.implementation!r}: {error}") from error

    def fits(**changes: int) -> bool:
        try:
            check(dataclasses.replace(limits, **changes))
        except ValueError:
            return False
        return True

    try:
        check(limits)
    except ValueError as error:
        changes = _smallest_changes(limits, fits)
        advice = f". Any one of these would do: {', '.join(changes)}" if changes else ""
        raise ValueError(f"{error}{advice}") from error


def _smallest_changes(limits: Limits, fits: Callable[..., bool]) -> list[str]:
    """The nearest value of each setting with which everything fits, where there is one."""
    smaller = {
        name: bisect.bisect_left(range(1, getattr(limits, name)), True, key=lambda n, name=name: not fits(**{name: n}))
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    }
    sizes = [limits.block_size << shift for shift in range(1, _LARGEST_BLOCK.bit_length())]
    larger = [size for size in sizes if size <= _LARGEST_BLOCK and fits(block_size=size)]
    return [f"{name}={value}" for name, value in {**smaller, "block_size": min(larger, default=0)}.items() if value]
