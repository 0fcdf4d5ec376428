"""Handed back: what a part of a step gives lies where the results of an earlier step lay, which nobody reads any more.

A part takes pools, which it writes in place, and gives them with results. Each result is written into an array like it
that the call is given behind its other arguments: so no step allocates, and addresses stay. `Spares` has these arrays,
and as many sets of a part's as its steps are in flight or still read: a set comes back when its step was committed, so
what a host reads is never written. The packed input of a step is such an array too, in the host's memory.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ferrum_jax.models.sharding import crosses_processes, formats, on_mesh, partitions
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime.buckets import Bucket, DraftBucket, LaunchBucket, RowBucket
from ferrum_jax.runtime.compile.deferred import Executable
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.sampling import RESULT_WORDS
from ferrum_jax.runtime.step_options import StepOptions, compiler_options, expert_dtype

_ALIGNMENT = 64  # bytes; from there the CPU's devices read the host's memory in place
Shapes = tuple[jax.ShapeDtypeStruct, ...]


def result(mesh: Mesh, shape: tuple[int, ...], dtype: Any, axis: str) -> jax.ShapeDtypeStruct:
    """A result on a mesh where each data shard gives `shape`. axis: logical, of the first axis.

    Where data shards are of several processes every device has all of it: a process reads those of its own alone.
    """
    array = on_mesh(mesh, shape, dtype, axis, None)
    return on_mesh(mesh, array.shape, dtype, None, None) if crosses_processes(mesh) else array


def results_of(
    part: Bucket | RowBucket | LaunchBucket | DraftBucket, pools: Pools, options: StepOptions, mesh: Mesh
) -> Shapes:
    """What a part of a step gives beside pools."""

    def rows(count: int, width: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return result(mesh, (count, width), dtype, "rows")

    if isinstance(part, DraftBucket):
        return (rows(part.num_places, 1),)
    words = RESULT_WORDS + (pools.masks.shape[1] if options.gives_masks else 0)
    if isinstance(part, RowBucket):
        return rows(part.num_rows, words), rows(part.num_rows, pools.hidden.shape[1], pools.hidden.dtype)
    bucket = part if isinstance(part, Bucket) else part.forward
    drawn = () if isinstance(part, Bucket) else (rows(bucket.num_rows, words),)
    if not options.gives_experts:
        return drawn
    experts, layers = options.spec.experts, len(options.spec.routed_layers)
    assert experts is not None, "steps give experts where there are some"
    form = (bucket.num_tokens, layers * experts.num_experts_per_tok), expert_dtype(experts.num_experts)
    return *drawn, result(mesh, *form, "tokens")


def trace_part(
    part: Callable[..., tuple[Any, ...]],
    arguments: tuple[Any, ...],
    results: Shapes,
    *,
    pools: tuple[int, ...],
    mesh: Mesh,
    options: StepOptions,
    keeps: bool = True,
) -> jax.stages.Traced:
    """A part of a step on a mesh, ready to be lowered: one program that every device runs on its own.

    part: (*arguments) to (the arguments at `pools`, *results). The program takes an array like each result behind the
    arguments, as one tuple; these and the pools are donated. keeps: False for results that are new in each call.
    """

    def run(*given: Any) -> tuple[Any, ...]:
        found = part(*given[: len(arguments)])
        new = found[len(pools) :]
        if crosses_processes(mesh):
            new = tuple(jax.lax.all_gather(x, DATA, axis=0, tiled=True) for x in new)
        for spares in given[len(arguments) :]:  # whole arrays are written, so XLA sees an alias and no update
            new = [jax.lax.dynamic_update_slice(spare, x, (0, 0)) for spare, x in zip(spares, new, strict=True)]
        return *found[: len(pools)], *new

    given, program = (*arguments, results) if keeps else arguments, run
    if mesh.size > 1:
        specs = partitions(given)
        outs = (*(specs[i] for i in pools), *partitions(results))
        program = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    jitted = jax.jit(
        program,
        donate_argnums=(*pools, len(arguments)) if keeps else (),
        out_shardings=formats((*(arguments[i] for i in pools), *results)),
        compiler_options=compiler_options(options),
    )
    return jitted.trace(*given)


class Spares:
    """Arrays of results, and of packed inputs, that nobody reads any more. results_of: their shapes, of a part."""

    def __init__(self, results_of: Callable[[Any], Shapes]) -> None:
        self._results_of = results_of
        self._free: collections.defaultdict[Hashable, list[Any]] = collections.defaultdict(list)
        self._lent: list[tuple[Hashable, Any]] = []

    def call(self, part: Hashable, executable: Executable, *arguments: Any) -> tuple[Any, ...]:
        """What a part's executable gives, its results in spare arrays, which are lent until they are given back."""
        free = self._free[part]
        spares = free.pop() if free else tuple(map(_zeros, self._results_of(part)))
        found = executable(*arguments, spares)
        self._lent.append((part, found[len(found) - len(spares) :]))
        return found

    def words(self, packed: np.ndarray) -> np.ndarray:
        """The packed input of a step in memory that stays, which is lent likewise."""
        free = self._free[packed.size]
        words = free.pop() if free else _aligned(packed.size)
        words[:] = packed
        self._lent.append((packed.size, words))
        return words

    def returning(self) -> Callable[[], None]:
        """Call this to give back what was lent since the last call, when every step and the host have read it."""
        lent, self._lent = self._lent, []
        return functools.partial(self._take_back, lent)

    def _take_back(self, lent: Sequence[tuple[Hashable, Any]]) -> None:
        for key, what in lent:
            self._free[key].append(what)


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    value = np.zeros(shape.shape, shape.dtype)
    return jax.make_array_from_callback(shape.shape, shape.sharding, value.__getitem__)


def _aligned(size: int) -> np.ndarray:
    """[size] int32 that begins where a device of the CPU can read it."""
    whole = np.zeros(4 * size + _ALIGNMENT, np.uint8)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + 4 * size].view(np.int32)
