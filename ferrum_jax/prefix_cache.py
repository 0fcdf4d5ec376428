"""Cached prefixes on disk: blocks of the pools by their keys into a folder, and back in another process.

What belongs to a key is the same on every mesh and for every packing of the pools; the folder says of which
model, KV dtype and block size it is, and is refused where one of them differs (`checkpoints/prefixes.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.prefixes import load_prefixes, save_prefixes
from ferrum_jax.cache.blocks import LayerBlocks
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
        """Writes the blocks of these keys, or all that are cached; how many that were.

        Raises ValueError when there is none, or when `path` is there and not an empty folder.
        """
        self._refuse_states()
        wanted = None if keys is None else set(keys)
        arrays: dict[str, np.ndarray] = {}
        count = 0
        self._move()
        for group, pool in enumerate(self.cache.pools):
            found = [(id, key) for id, key in pool.keyed() if wanted is None or key in wanted]
            in_host = [(id, key) for id, key in self._in_host(group) if wanted is None or key in wanted]
            if found or in_host:
                count += len(found) + len(in_host)
                arrays[f"{group}/keys"] = np.frombuffer(
                    b"".join(key for _, key in (*in_host, *found)), np.uint8
                ).reshape(-1, KEY_BYTES)
                arrays.update(self._read(group, [id for id, _ in found], [id for id, _ in in_host]))
        if not arrays:
            raise ValueError(f"no full block is cached, so there is nothing to save to {path}")
        save_prefixes(path, self._identity(), arrays)
        return count

    def _in_host(self, group: int) -> list[tuple[int, bytes]]:
        """(host id, key) of each block that only host memory has."""
        if self.cache.tier is None:
            return []
        find = self.cache.pools[group].find
        return [(id, key) for id, key in self.cache.tier.pools[group].keyed() if not find(key)]

    def _move(self) -> None:
        """Brings what was evicted since the last step to host memory, before anything is written in its place."""
        if self.cache.tier is not None:
            self.runner.move(*self.cache.tier.take())

    def _read(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """The blocks of host memory, which were used longer ago, then those of the pools."""
        batches = [dict(self._named(group, self.runner.read_host_blocks(group, host_ids)))] if host_ids else []
        for part, blocks in self.runner.read_blocks(group, ids):
            count = part.stop - part.start
            batches.append({name: np.asarray(array)[:count] for name, array in self._named(group, blocks)})
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def _named(self, group: int, blocks: tuple[LayerBlocks, ...]) -> Iterator[tuple[str, Any]]:
        for layer, of_layer in zip(self.spec.kv_groups[group].layers, blocks, strict=True):
            yield f"{group}/{layer}/values", of_layer.values
            if of_layer.scales is not None:
                yield f"{group}/{layer}/scales", of_layer.scales

    def read(self, path: Path) -> dict[str, np.ndarray]:
        """What a folder holds. Raises ValueError naming the folder if it is foreign or damaged."""
        self._refuse_states()
        return load_prefixes(path, self._identity())

    def _refuse_states(self) -> None:
        if self.spec.state_layers:
            raise ValueError(
                f"{self.spec.architecture} has recurrent layers, whose states are not saved yet, and blocks without "
                "them are no prefix; run the prompts again instead"
            )

    def put(self, arrays: Mapping[str, np.ndarray]) -> list[bytes]:
        """Caches what a folder held, the most recently used blocks where not all fit; the keys that are here then."""
        present: list[bytes] = []
        for group, pool in enumerate(self.cache.pools):
            if f"{group}/keys" not in arrays:
                continue
            keys = [row.tobytes() for row in arrays[f"{group}/keys"]]
            missing = [row for row, key in enumerate(keys) if not pool.find(key)]
            rows = missing[max(len(missing) - pool.num_free, 0) :]
            ids = pool.take(len(rows))
            self._move()  # what was evicted for them is still there
            self.runner.write_blocks(group, ids, _Rows(self, group, arrays, rows).batch)
            for id, row in zip(ids, rows, strict=True):
                pool.publish(id, keys[row])
            pool.release(ids)
            present += [key for key in keys if pool.find(key)]
        return present

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


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a folder's arrays, as `Runner.write_blocks` asks for them."""

    prefixes: PrefixCache
    group: int
    arrays: Mapping[str, np.ndarray]
    rows: Sequence[int]

    def batch(self, part: slice, size: int) -> tuple[LayerBlocks, ...]:
        rows = np.asarray(self.rows[part])
        blocks = []
        for layer in self.prefixes.spec.kv_groups[self.group].layers:
            values = self.arrays[f"{self.group}/{layer}/values"]
            scales = self.arrays.get(f"{self.group}/{layer}/scales")
            blocks.append(
                LayerBlocks(
                    values=_padded(values[rows], size),
                    scales=None if scales is None else _padded(scales[rows], size),
                )
            )
        return tuple(blocks)


def _padded(array: np.ndarray, size: int) -> Any:
    """The rows, then zeros, a fresh array of `size`."""
    padded = np.zeros((size, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
