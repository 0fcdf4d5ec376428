"""Cached prefixes on disk: what the pools keep, by its keys, into a folder and back in another process.

Blocks, snapshots of recurrent states and the last hidden states of whole prompts are saved alike. What belongs to
a key is the same on every mesh and for every packing of the pools; the folder says of which model, KV dtype and
block size it is, and is refused where one of them differs (`checkpoints/prefixes.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.prefixes import load_prefixes, save_prefixes
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.scheduling.cache_manager import CacheManager
from ferrum_jax.scheduling.prefix import KEY_BYTES
from ferrum_jax.spec import ModelSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCache:
    """The prefixes that one engine caches: its books and its pools."""

    spec: ModelSpec
    fingerprint: bytes
    cache: CacheManager
    runner: Runner

    def save(self, path: Path, keys: Sequence[bytes] | None = None) -> int:
        """Writes what these keys find, or all that is cached; how many blocks that were.

        Raises ValueError when there is none, or when `path` is there and not an empty folder.
        """
        wanted = None if keys is None else set(keys)
        arrays: dict[str, np.ndarray] = {}
        count = 0
        self._move()
        for index, pool in self.cache.numbered_pools():
            found = _wanted(pool.keyed(), wanted)
            in_host = _wanted(self._in_host(index), wanted)
            if found or in_host:
                count += (len(found) + len(in_host)) * (index in self.runner.copies.of_blocks)
                packed = b"".join(key for _, key in (*in_host, *found))
                arrays[f"{self._name(index)}/keys"] = np.frombuffer(packed, np.uint8).reshape(-1, KEY_BYTES)
                arrays.update(self._read(index, [id for id, _ in found], [id for id, _ in in_host]))
        if not count:
            raise ValueError(f"no full block is cached, so there is nothing to save to {path}")
        save_prefixes(path, self._identity(), arrays)
        return count

    def _name(self, index: int) -> str:
        """Of a pool's arrays in a folder."""
        copies = self.runner.copies
        return {copies.of_states: "states", copies.of_prompts: "prompts"}.get(index, str(index))

    def _names(self, index: int) -> list[str]:
        return [f"{self._name(index)}/{name}" for name in self.runner.copies.names(index)]

    def _in_host(self, index: int) -> list[tuple[int, bytes]]:
        """(host id, key) of each block that only host memory has."""
        if self.cache.tier is None or index not in self.runner.copies.of_blocks:
            return []
        find = self.cache.pools[index].find
        return [(id, key) for id, key in self.cache.tier.pools[index].keyed() if not find(key)]

    def _move(self) -> None:
        """Brings what was evicted since the last step to host memory, before anything is written in its place."""
        if self.cache.tier is not None:
            self.runner.move(*self.cache.tier.take())

    def _read(self, index: int, ids: Sequence[int], host_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """What host memory has, which was used longer ago, then what the pools have."""
        batches = [jax.tree.leaves(self.runner.read_host_blocks(index, host_ids))] if host_ids else []
        for part, found in self.runner.read_pool(index, ids):
            batches.append([np.asarray(array)[: part.stop - part.start] for array in jax.tree.leaves(found)])
        return {name: np.concatenate(parts) for name, *parts in zip(self._names(index), *batches, strict=True)}

    def read(self, path: Path) -> dict[str, np.ndarray]:
        """What a folder holds. Raises ValueError naming the folder if it is foreign or damaged."""
        return load_prefixes(path, self._identity())

    def put(self, arrays: Mapping[str, np.ndarray]) -> list[bytes]:
        """Caches what a folder held, the most recently used where not all fits; the keys whose blocks are here then."""
        present: list[bytes] = []
        for index, pool in self.cache.numbered_pools():
            name = f"{self._name(index)}/keys"
            if name not in arrays:
                continue
            keys = [row.tobytes() for row in arrays[name]]
            missing = [row for row, key in enumerate(keys) if not pool.find(key)]
            rows = missing[max(len(missing) - pool.num_free, 0) :]
            ids = pool.take(len(rows))
            self._move()  # what was evicted for them is still there
            self.runner.write_pool(index, ids, self._batches(index, arrays, rows))
            for id, row in zip(ids, rows, strict=True):
                pool.publish(id, keys[row])
            pool.release(ids)
            if index in self.runner.copies.of_blocks:
                present += [key for key in keys if pool.find(key)]
        return present

    def _batches(
        self, index: int, arrays: Mapping[str, np.ndarray], rows: Sequence[int]
    ) -> Callable[[slice, int], Any]:
        """Rows of a folder's arrays, as `Runner.write_pool` asks for them."""
        tree = jax.tree.structure(self.runner.copies.shapes(index))

        def batch(part: slice, size: int) -> Any:
            chosen = np.asarray(rows[part])
            return jax.tree.unflatten(tree, [_padded(arrays[name][chosen], size) for name in self._names(index)])

        return batch

    def _identity(self) -> dict[str, Any]:
        """What the keys and blocks of a folder belong to."""
        spec = self.spec
        return {
            "model": self.fingerprint.hex(),
            "kv_dtype": self.cache.counters.kv_dtype,
            "block_size": self.cache.block_size,
            "num_key_value_heads": spec.num_key_value_heads,
            "head_dim": spec.head_dim,
            "layers_by_group": [list(group.layers) for group in spec.kv_groups],
        }


def _wanted(found: Sequence[tuple[int, bytes]], wanted: set[bytes] | None) -> list[tuple[int, bytes]]:
    """Those of (id, key) whose key is wanted; None wants all."""
    return [(id, key) for id, key in found if wanted is None or key in wanted]


def _padded(array: np.ndarray, size: int) -> Any:
    """The rows, then zeros, a fresh array of `size`."""
    padded = np.zeros((size, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
