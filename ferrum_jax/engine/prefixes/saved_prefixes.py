"""Cached prefixes on disk: what the pools keep, by its keys, into a folder and back in another process.

Blocks, snapshots of recurrent states and the last hidden states of whole prompts are saved alike. What belongs to
a key is the same on every mesh and for every packing of the pools; the folder says which model, KV dtype and
block size it is, and is refused where one of them differs, or where it has not the bits of invariant mode and the
engine promises them (`checkpoints/prefixes.py`). What several data shards have is saved once; of what is loaded every
shard takes as much as it holds, so that prompts may run on any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints.prefixes import load_prefixes, save_prefixes
from ferrum_jax.core.kv_cache.cache_manager import CacheManager
from ferrum_jax.core.kv_cache.id_pool import IdPool
from ferrum_jax.core.kv_cache.keys import KEY_BYTES
from ferrum_jax.engine.of_tokens.kept_experts import KeptExperts
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.block_copies import BlockCopies
from ferrum_jax.runtime.runner import Runner

_EXPERTS = "experts/kept"


class _SavedBlocks(NamedTuple):
    """Saved blocks of one pool of one data shard, or of its host memory."""

    shard: int
    in_host: bool
    ids: list[int]
    keys: list[bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """The prefixes that one engine caches: the books of each data shard, and the pools.

    invariant: their bits are those of invariant mode, so it reads no others. copies: in which form pools are saved.
    experts: with which they are saved and read, of an engine that keeps some.
    """

    spec: ModelSpec
    fingerprint: bytes
    invariant: bool
    caches: Sequence[CacheManager]
    runner: Runner
    copies: BlockCopies
    experts: KeptExperts | None = None

    def save(self, path: Path, keys: Sequence[bytes] | None = None) -> int:
        """Writes what these keys find, or all that is cached; how many blocks that were.

        Raises ValueError when there is none, or when `path` is there and not an empty folder.
        """
        wanted = None if keys is None else set(keys)
        arrays: dict[str, np.ndarray] = {}
        count = 0
        self._move()
        for index, _ in self.caches[0].numbered_pools():
            parts = self._find(index, wanted)
            found = [key for part in parts for key in part.keys]
            if found:
                count += len(found) * (index in self.copies.of_blocks)
                arrays[f"{self.name(index)}/keys"] = np.frombuffer(b"".join(found), np.uint8).reshape(-1, KEY_BYTES)
                arrays.update(self._read(index, parts))
                if self._has_experts(index):
                    arrays[_EXPERTS] = self._read_experts(parts)
        if not count:
            raise ValueError(f"no full block is cached, so there is nothing to save to {path}")
        save_prefixes(path, self.identity(), arrays)
        return count

    def _find(self, index: int, wanted: set[bytes] | None) -> list[_SavedBlocks]:
        """Each shard's blocks of a pool that no earlier shard has: first in host memory, then in the pool."""
        parts: list[_SavedBlocks] = []
        seen: set[bytes] = set()
        for shard, cache in enumerate(self.caches):
            pool = dict(cache.numbered_pools())[index]
            for in_host, keyed in ((True, self._in_host(cache, index)), (False, pool.keyed())):
                found = [(id, key) for id, key in keyed if key not in seen and (wanted is None or key in wanted)]
                seen.update(key for _, key in found)
                parts.append(_SavedBlocks(shard, in_host, [id for id, _ in found], [key for _, key in found]))
        return parts

    def name(self, index: int) -> str:
        """The name of a pool's arrays in a folder."""
        return {self.copies.of_states: "states", self.copies.of_prompts: "prompts"}.get(index, str(index))

    def names(self, index: int) -> list[str]:
        """The names of a pool's arrays but that of the keys, in the order of their tree's leaves."""
        return [f"{self.name(index)}/{name}" for name in self.copies.names(index)]

    def send_rows(self, index: int, keys: Sequence[bytes]) -> list[tuple[slice, Any]] | None:
        """Batches of a pool's rows on their way to the host; None where no shard's pool has all of these keys."""
        for shard, cache in enumerate(self.caches):
            ids = [dict(cache.numbered_pools())[index].find(key) for key in keys]
            if all(ids):
                return list(self.runner.send_pool(shard, index, ids))
        return None

    def put_rows(self, index: int, keys: Sequence[bytes], arrays: Mapping[str, np.ndarray]) -> None:
        """Caches rows of one pool on every shard, as `put`. arrays: by `names`."""
        for shard, cache in enumerate(self.caches):
            self._put(shard, index, dict(cache.numbered_pools())[index], keys, arrays)

    def _in_host(self, cache: CacheManager, index: int) -> list[tuple[int, bytes]]:
        """(host id, key) of each block that a shard has in host memory only."""
        if cache.tier is None or index not in self.copies.of_blocks:
            return []
        find = cache.pools[index].find
        return [(id, key) for id, key in cache.tier.pools[index].keyed() if not find(key)]

    def _move(self) -> None:
        """Brings what was evicted since the last step to host memory, before anything is written in its place."""
        for shard, cache in enumerate(self.caches):
            if cache.tier is not None:
                orders = cache.tier.take()
                self.runner.move(shard, *orders)
                if self.experts is not None:
                    self.experts.move(shard, *orders)

    def _read(self, index: int, parts: Sequence[_SavedBlocks]) -> dict[str, np.ndarray]:
        """The arrays of the parts' blocks, one after the other."""
        batches: list[list[Any]] = []
        for shard, in_host, ids, _ in parts:
            if in_host and ids:
                assert self.runner.host is not None, "there are host ids, so there is host memory"
                batches.append(jax.tree.leaves(self.runner.host.read(shard, index, ids)))
            elif ids:
                for part, found in self.runner.read_pool(shard, index, ids):
                    batches.append([array[: part.stop - part.start] for array in jax.tree.leaves(found)])
        return {name: np.concatenate(arrays) for name, *arrays in zip(self.names(index), *batches, strict=True)}

    def _has_experts(self, index: int) -> bool:
        """Whether experts are kept beside the blocks of a pool."""
        return self.experts is not None and self.experts.group == index

    def _read_experts(self, parts: Sequence[_SavedBlocks]) -> np.ndarray:
        """[n, C, layers with experts * X] of the blocks of the parts, one after the other."""
        assert self.experts is not None, "they are kept"
        return np.concatenate([self.experts.read(part.shard, part.ids, in_host=part.in_host) for part in parts])

    def read(self, path: Path) -> dict[str, np.ndarray]:
        """A folder's arrays. Raises ValueError naming the folder if it is foreign or damaged."""
        return load_prefixes(path, self.identity())

    def keys(self, arrays: Mapping[str, np.ndarray]) -> list[bytes]:
        """The keys of all that a folder held: blocks, states and prompts."""
        found = [arrays.get(f"{self.name(index)}/keys", ()) for index, _ in self.caches[0].numbered_pools()]
        return list(dict.fromkeys(row.tobytes() for rows in found for row in rows))

    def put(self, arrays: Mapping[str, np.ndarray]) -> list[bytes]:
        """Caches what a folder held, the most recently used where not all fits; the keys whose blocks are here then."""
        present: dict[bytes, None] = {}
        for index, _ in self.caches[0].numbered_pools():
            keys = [row.tobytes() for row in arrays.get(f"{self.name(index)}/keys", ())]
            self.put_rows(index, keys, arrays)
            if index in self.copies.of_blocks:
                present |= dict.fromkeys(key for cache in self.caches for key in keys if cache.pools[index].find(key))
        return list(present)

    def _put(
        self, shard: int, index: int, pool: IdPool, keys: Sequence[bytes], arrays: Mapping[str, np.ndarray]
    ) -> None:
        """Into one pool of one shard."""
        missing = [row for row, key in enumerate(keys) if not pool.find(key)]
        rows = missing[max(len(missing) - pool.num_free, 0) :]
        ids = pool.take(len(rows))
        self._move()  # what was evicted for them is still there
        self.runner.write_pool(shard, index, ids, self._batches(index, arrays, rows))
        if self.experts is not None and self._has_experts(index) and rows:
            self.experts.write(shard, ids, arrays[_EXPERTS][rows])
        for id, row in zip(ids, rows, strict=True):
            pool.publish(id, keys[row])
        pool.release(ids)

    def _batches(
        self, index: int, arrays: Mapping[str, np.ndarray], rows: Sequence[int]
    ) -> Callable[[slice, int], Any]:
        """Rows of a folder's arrays, as `Runner.write_pool` asks for them."""
        tree = jax.tree.structure(self.copies.shapes(index))

        def batch(part: slice, size: int) -> Any:
            chosen = np.asarray(rows[part])
            return jax.tree.unflatten(tree, [_padded(arrays[name][chosen], size) for name in self.names(index)])

        return batch

    def identity(self) -> dict[str, Any]:
        """The settings under which a folder's keys and blocks are valid."""
        spec = self.spec
        return {
            "model": self.fingerprint.hex(),
            "invariant": self.invariant,
            "experts": self.experts is not None,
            "kv_dtype": self.caches[0].counters.kv_dtype,
            "block_size": self.caches[0].sizes.block_size,
            "num_key_value_heads": spec.attention.num_key_value_heads,
            "head_dim": spec.attention.head_dim,
            "layers_by_group": [list(group.layers) for group in spec.kv_groups],
        }


def _padded(array: np.ndarray, size: int) -> Any:
    """The rows, then zeros, a fresh array of `size`."""
    padded = np.zeros((size, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
