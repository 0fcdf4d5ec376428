"""Pins: blocks that stay live though no row holds them, such as those of a system prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_jax.scheduling.id_pool import IdPool


class Pins:
    """Pinned ids of each cache group; a pin is one holder."""

    def __init__(self, pools: Sequence[IdPool]) -> None:
        self._pools = tuple(pools)
        self._ids: tuple[set[int], ...] = tuple(set() for _ in pools)

    def add(self, keys: Sequence[bytes]) -> int:
        """Pin the blocks of those keys in every group that has them; how many of the keys have any.

        A group with a window may have lost those that no later token needs.
        """
        count = 0
        for key in keys:
            ids = [pool.find(key) for pool in self._pools]
            count += any(ids)
            for pool, pinned, id in zip(self._pools, self._ids, ids, strict=True):
                if id and id not in pinned:
                    pool.retain(id)
                    pinned.add(id)
        return count

    def clear(self) -> None:
        """Pin nothing any more; what no row holds is cached again."""
        for pool, pinned in zip(self._pools, self._ids, strict=True):
            pool.release(sorted(pinned, reverse=True))
            pinned.clear()

    def ids(self, group: int) -> set[int]:
        return self._ids[group]

    def num_among(self, group: int, keys: Sequence[bytes]) -> int:
        """How many blocks of these keys are pinned."""
        return sum(self._pools[group].find(key) in self._ids[group] for key in keys)

    @property
    def num_pinned(self) -> int:
        return sum(map(len, self._ids))
