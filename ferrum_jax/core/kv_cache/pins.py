"""Pins: ids that stay live though no row holds them, such as the blocks and the state after a system prompt."""

from collections.abc import Iterable, Mapping, Sequence

from ferrum_jax.core.kv_cache.id_pool import IdPool

Pinnable = Mapping[IdPool, Sequence[int]]  # ids with keys, by their pool; 0 stands for none


class Pins:
    """Pinned ids of each pool; a pin is one holder."""

    def __init__(self, blocks: Sequence[IdPool], others: Iterable[IdPool]) -> None:
        """blocks: the pools of the cache groups. others: of states and of prompts."""
        self._blocks = tuple(blocks)
        self._ids: dict[IdPool, set[int]] = {pool: set() for pool in (*blocks, *others)}

    def find(self, keys: Sequence[bytes]) -> Pinnable:
        """Ids kept under these keys, by pool."""
        return {pool: [pool.find(key) for key in keys] for pool in self._ids}

    def new(self, pool: IdPool, ids: Iterable[int]) -> set[int]:
        """The ids that are not pinned yet."""
        return set(ids) - self._ids[pool] - {0}

    def add(self, wanted: Pinnable) -> None:
        for pool, ids in wanted.items():
            for id in sorted(self.new(pool, ids)):
                pool.retain(id)
                self._ids[pool].add(id)

    def clear(self) -> None:
        """Pin nothing any more; what no row holds is cached again."""
        for pool, pinned in self._ids.items():
            pool.release(sorted(pinned, reverse=True))
            pinned.clear()

    def ids(self, pool: IdPool) -> set[int]:
        return self._ids[pool]

    def num_among(self, pool: IdPool, keys: Iterable[bytes]) -> int:
        """How many ids of these keys are pinned."""
        return sum(pool.find(key) in self._ids[pool] for key in keys)

    @property
    def num_pinned(self) -> int:
        """Blocks of all cache groups."""
        return sum(len(self._ids[pool]) for pool in self._blocks)
