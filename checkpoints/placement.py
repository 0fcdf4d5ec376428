"""From arrays in host memory (most often a mapped file) to device arrays, one or two at a time.

Where the dtype is the asked one and the data lies on 64 bytes, jax on the CPU takes the mapped pages as
they are and no memory is spent; the array keeps the mapping alive. Everything else is cast straight into
one aligned buffer, which jax then takes as it is, so that no tensor ever has two copies in host memory.
Mappings are private (copy on write): nothing done to a device array reaches the file.
"""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from checkpoints.rules import Expansion
from checkpoints.stored_weight import WeightForm, is_packed, weight_of, weight_of_leaf

ALIGNMENT = 64  # bytes; what XLA wants of a host buffer that it does not copy
_AT_ONCE = 2  # weights: each is in host memory until its device has it

Index = tuple[slice, ...]


def place_all(
    sources: Mapping[str, Sequence[Any]],
    targets: Mapping[str, jax.ShapeDtypeStruct],
    expansions: Mapping[str, Expansion],
) -> dict[str, jax.Array]:
    """`place` of every target, in their order. sources: of each weight.

    Two threads share the work, because memory that is written for the first time costs more than the copy. Leaves of
    forms are made one after the other, so that no two weights are there in float32, and so is what has no sharding,
    because a default device is of its thread.
    """

    def own(name: str) -> jax.Array:
        return place(leaves_of(sources[weight_of(name)], name), targets[name], expansions.get(name))

    alike = all(target.sharding is not None and weight_of_leaf(name) is None for name, target in targets.items())
    if not alike:
        return {name: own(name) for name in targets}
    threads = concurrent.futures.ThreadPoolExecutor(_AT_ONCE)
    try:
        return dict(zip(targets, threads.map(own, targets), strict=True))
    finally:
        threads.shutdown(cancel_futures=True)  # after an error or Ctrl-C, waits only for those that run


def place(sources: Sequence[Any], target: jax.ShapeDtypeStruct, expansion: Expansion | None = None) -> jax.Array:
    """The array of the target's shape, dtype and sharding (default device when it has none), ready.

    sources: one array (or `Leaf` of a form) of the target's shape, or E of them that are stacked to it on a new leading
    axis; with an expansion, one array of its rows. With a sharding, each shard reads only its own part of the sources.
    """
    whole = (slice(None),) * len(target.shape)

    def part(index: Index | None) -> np.ndarray:
        index = whole if index is None else index
        return _part(sources, index, target) if expansion is None else _expanded(sources[0], index, target, expansion)

    if target.sharding is None:
        return jax.device_put(part(whole)).block_until_ready()
    return _from_shards(part, target.shape, target.sharding)


def _from_shards(
    part: Callable[[Index | None], np.ndarray], shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> jax.Array:
    """The array, read one shard at a time; `jax.make_array_from_callback` would hold all shards in host memory."""
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
    targets: Mapping[str, jax.ShapeDtypeStruct], expansions: Mapping[str, Expansion]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of what is stored for each target, without shardings."""
    shapes = {
        name: expansions[name].stored_shape(t.shape) if name in expansions else t.shape for name, t in targets.items()
    }
    return {name: jax.ShapeDtypeStruct(shapes[name], target.dtype) for name, target in targets.items()}


def whole_targets(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """The targets with the leaves of each form put together as one weight [.., out, in], by its name."""
    found = {}
    for name, target in targets.items():
        weight, leaf = weight_of_leaf(name) or (name, None)
        if leaf in (None, "codes"):
            packs = leaf is not None and is_packed(np.dtype(target.dtype).name)
            shape = (*target.shape[:-1], target.shape[-1] * 2) if packs else target.shape
            found[weight] = jax.ShapeDtypeStruct(shape, np.float32 if leaf else target.dtype)
    return found


def weight_shapes(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, whole."""
    return {name: tuple(target.shape) for name, target in whole_targets(targets).items()}


def leaves_of(sources: Sequence[Any], name: str) -> list[Any]:
    """The sources of a parameter, given those of its weight: the same, or one leaf of each."""
    found = weight_of_leaf(name)
    return list(sources) if found is None else [source.leaf(found[1]) for source in sources]


def made_forms(targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, WeightForm]:
    """{weight: the form that its leaves have}, only the fields needed to quantise a dense weight."""
    found = {}
    for name, whole in whole_targets(targets).items():
        codes, scales = targets.get(f"{name}.codes"), targets.get(f"{name}.scales")
        if codes is not None and scales is not None:
            kind = {"int8": "int8", "uint8": "int4"}.get(np.dtype(codes.dtype).name, "fp8_e4m3")
            kind = "mxfp4" if np.dtype(scales.dtype) == np.uint8 else kind
            group = None if scales.shape[-1] == 1 else whole.shape[-1] // scales.shape[-1]
            found[name] = WeightForm(kind=kind, group=group, scale_dtype=np.dtype(scales.dtype).name)
    return found


def form_problems(
    plan: Mapping[str, Sequence[Any]], targets: Mapping[str, jax.ShapeDtypeStruct], described: str
) -> list[str]:
    """Weights whose sources do not have the form of their targets. described: where that form comes from."""
    wanted: dict[str, dict[str, tuple[tuple[int, ...], np.dtype]]] = {name: {} for name in plan}
    for name, target in targets.items():
        if (found := weight_of_leaf(name)) is not None:
            wanted[found[0]][found[1]] = tuple(target.shape), np.dtype(target.dtype)
    problems = []
    for name, sources in plan.items():
        for source in sources:
            have = {leaf: dtype for leaf, (_, dtype) in getattr(source, "leaf_shapes", {}).items()}
            want = {leaf: dtype for leaf, (_, dtype) in wanted[name].items()}
            shapes = {leaf: shape for leaf, (shape, _) in getattr(source, "leaf_shapes", {}).items()}
            same = have == want and all(wanted[name][leaf][0][-len(shapes[leaf]) :] == shapes[leaf] for leaf in want)
            if not same:
                problems.append(f"{name} is {_shown(have)}; {described} says {_shown(want)}")
                break
    return problems


def _shown(leaves: Mapping[str, np.dtype]) -> str:
    return ", ".join(f"{leaf} {dtype}" for leaf, dtype in leaves.items()) or "dense"


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


def _expanded(source: np.ndarray, index: Index, target: jax.ShapeDtypeStruct, expansion: Expansion) -> np.ndarray:
    rows = expansion.stored(np.arange(target.shape[0])[index[0]])
    real = rows[rows < expansion.rows]
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
