"""WriteGuard: a debug mode that proves, on the device, that no step writes what others may read.

Before each step it digests what every id with a key stands for (blocks, snapshots, hidden states of prompts), and
after the step once more. An id that the step's plan evicted has another meaning then; every other must hold the
same bytes. It reads all that is cached twice a step: for tests and for the search of a fault.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from types import TracebackType

import jax

from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.runtime.runner import Runner

_Place = tuple[int, int, int]  # data shard, number of a pool, id


class WriteGuard:
    """Around each step of one engine: `with guard: ...`. Raises RuntimeError that names what was written."""

    def __init__(self, caches: Sequence[CacheManager], runner: Runner) -> None:
        """caches: of each data shard."""
        self._runner = runner
        self._pools = [
            (shard, index, pool) for shard, cache in enumerate(caches) for index, pool in cache.numbered_pools()
        ]
        self._before: dict[_Place, bytes] = {}
        self._evicted: set[_Place] = set()
        for shard, index, pool in self._pools:
            pool.on_evict = functools.partial(self._evict, shard, index, pool.on_evict)

    def _evict(self, shard: int, index: int, then: Callable[[int, bytes], None] | None, id: int, key: bytes) -> None:
        self._evicted.add((shard, index, id))
        if then is not None:
            then(id, key)

    def __enter__(self) -> None:
        self._evicted.clear()
        self._before = {}
        for shard, index, pool in self._pools:
            _refuse_unkeyed_sharing(shard, index, pool)
            self._before |= self._digests(shard, index, [id for id, _ in pool.keyed()])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            return
        kept = {place: digest for place, digest in self._before.items() if place not in self._evicted}
        after: dict[_Place, bytes] = {}
        for shard, index, _ in self._pools:
            after |= self._digests(shard, index, [id for *pool, id in kept if pool == [shard, index]])
        written = sorted(place for place, digest in kept.items() if after[place] != digest)
        if written:
            raise RuntimeError(
                f"a step wrote what others may read, as (data shard, pool, id): {written}; pools are numbered as in "
                "plan.Copy"
            )

    def _digests(self, shard: int, index: int, ids: list[int]) -> dict[_Place, bytes]:
        digests = {}
        for part, batch in self._runner.read_pool(shard, index, ids):
            arrays = jax.tree.leaves(batch)
            for row, id in enumerate(ids[part]):
                content = b"".join(array[row].tobytes() for array in arrays)
                digests[shard, index, id] = hashlib.blake2b(content, digest_size=16).digest()
        return digests


def _refuse_unkeyed_sharing(shard: int, index: int, pool: IdPool) -> None:
    shared = [id for id in range(1, pool.num_ids) if pool.num_holders(id) > 1 and pool.key_of(id) is None]
    if shared:
        raise RuntimeError(f"ids {shared} of pool {index}, shard {shard}, are shared and were not published")
