"""From arrays in host memory (most often a mapped file) to device arrays, one at a time.

Where the dtype is the asked one and the data lies on 64 bytes, jax on the CPU takes the mapped pages as
they are and no memory is spent; the array keeps the mapping alive. Everything else is cast straight into
one aligned buffer, which jax then takes as it is, so that no tensor ever has two copies in host memory.
Mappings are private (copy on write): nothing done to a device array reaches the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from checkpoints.rules import Stretch

ALIGNMENT = 64  # bytes; what XLA wants of a host buffer that it does not copy

Index = tuple[slice, ...]


def place(sources: Sequence[np.ndarray], target: jax.ShapeDtypeStruct, stretch: Stretch | None = None) -> jax.Array:
    """The array of the target's shape, dtype and sharding (default device when it has none), ready.

    sources: one array (or `Mxfp4`) of the target's shape, or E of them that are stacked to it on a new leading axis;
    with a stretch, one array of its rows. With a sharding, each shard reads only its own part of the sources.
    """
    whole = (slice(None),) * len(target.shape)

    def part(index: Index | None) -> np.ndarray:
        index = whole if index is None else index
        return _part(sources, index, target) if stretch is None else _stretched(sources[0], index, target, stretch)

    if target.sharding is None:
        return jax.device_put(part(whole)).block_until_ready()
    return _from_shards(part, target.shape, target.sharding)


def _from_shards(
    part: Callable[[Index | None], np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array, of which one shard at a time is in host memory; `jax.make_array_from_callback` has them all there."""
    indices = sharding.addressable_devices_indices_map(shape)
    shards: dict[Any, jax.Array] = {}  # by device
    for device, index in indices.items():
        if device not in shards:
            piece = part(index)
            alike = [other for other, its in indices.items() if its == index]
            # its host buffer is done with before the next is made
            shards |= {other: jax.device_put(piece, other).block_until_ready() for other in alike}
    return jax.make_array_from_single_device_arrays(shape, sharding, [shards[device] for device in indices])


def stored_targets(
    targets: Mapping[str, jax.ShapeDtypeStruct], stretches: Mapping[str, Stretch]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of what is stored for each target, without shardings."""
    shapes = {
        name: stretches[name].stored_shape(t.shape) if name in stretches else t.shape for name, t in targets.items()
    }
    return {name: jax.ShapeDtypeStruct(shapes[name], target.dtype) for name, target in targets.items()}


def _part(sources: Sequence[np.ndarray], index: Index, target: jax.ShapeDtypeStruct) -> np.ndarray:
    dtype = np.dtype(target.dtype)
    if sources[0].shape != target.shape:  # stacked
        chosen = [source[index[1:]] for source in sources[index[0]]]
        out = aligned_empty((len(chosen), *chosen[0].shape), dtype)
        for row, source in zip(out, chosen, strict=True):
            cast_into(row, source)
        return out
    source = np.asarray(sources[0][index])  # a scalar stays an array
    if source.dtype == dtype and source.flags.c_contiguous and source.ctypes.data % ALIGNMENT == 0:
        return source
    out = aligned_empty(source.shape, dtype)
    cast_into(out, source)
    return out


def _stretched(source: np.ndarray, index: Index, target: jax.ShapeDtypeStruct, stretch: Stretch) -> np.ndarray:
    rows = stretch.stored(np.arange(target.shape[0])[index[0]])
    real = rows[rows < stretch.rows]
    columns = [len(range(*part.indices(length))) for part, length in zip(index[1:], source.shape[1:], strict=True)]
    out = aligned_empty((len(rows), *columns), np.dtype(target.dtype))
    done = 0
    for run in np.split(real, np.flatnonzero(np.diff(real) != 1) + 1):  # neighbours are copied as one slice
        cast_into(out[done : done + len(run)], source[(slice(run[0], run[-1] + 1), *index[1:])])
        done += len(run)
    out[done:] = 0
    return out


def cast_into(out: np.ndarray, source: np.ndarray) -> None:
    """Writes `source` to `out`, rounded to nearest; beyond out's range it is inf, as in a cast on a device."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out, source, casting="unsafe")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose data lies on ALIGNMENT bytes."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
