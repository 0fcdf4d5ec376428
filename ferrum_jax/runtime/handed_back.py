"""Handed back: what a part of a step gives lies where the results of an earlier step lay, which nobody reads any more.

A part takes pools, which it writes in place, and gives them with results. Each result is written into an array like it
that the call is given behind its other arguments: so no step allocates, and addresses stay. `Spares` has these arrays,
and as many sets of a part's as its steps are in flight or still read: a set comes back when its step was committed, so
what a host reads is never written. The packed input of a step is such an array too, in the host's memory.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ferrum_jax.models.sharding import crosses_processes, formats, on_mesh, partitions
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime.buckets import Bucket, DraftBucket, Extra, LaunchBucket, RowBucket
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


def results_of(part: Bucket | Extra | DraftBucket, pools: Pools, options: StepOptions, mesh: Mesh) -> Shapes:
    """What a part of a step gives beside pools."""
    forms: list[tuple[tuple[int, int], Any, str]] = []
    if isinstance(part, RowBucket | LaunchBucket):
        width = RESULT_WORDS + (pools.masks.shape[1] if options.gives_masks else 0)
        forms.append(((part.num_rows, width), np.int32, "rows"))
    if isinstance(part, RowBucket):
        forms.append(((part.num_rows, pools.hidden.shape[1]), pools.hidden.dtype, "rows"))
    elif isinstance(part, DraftBucket):
        forms.append(((part.num_places, 1), np.int32, "rows"))
    elif options.gives_experts:
        experts, bucket = options.spec.experts, part if isinstance(part, Bucket) else part.forward
        assert experts is not None, "steps give experts where there are some"
        width = len(options.spec.routed_layers) * experts.num_experts_per_tok
        forms.append(((bucket.num_tokens, width), expert_dtype(experts.num_experts), "tokens"))
    return tuple(result(mesh, *form) for form in forms)


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
    """Arrays of results, and of packed inputs, that nobody reads any more. results_of: their shapes, of a part.

    lent: by part, or by size, what was taken for the step that is being dispatched.
    """

    def __init__(self, results_of: Callable[[Any], Shapes]) -> None:
        self._results_of = results_of
        self._free: collections.defaultdict[Hashable, list[Any]] = collections.defaultdict(list)
        self.lent: list[tuple[Hashable, Any]] = []

    def call(self, part: Hashable, executable: Executable, *arguments: Any) -> tuple[Any, ...]:
        """What a part's executable gives, its results in spare arrays, which are lent until they are given back."""
        free = self._free[part]
        spares = free.pop() if free else tuple(map(_zeros, self._results_of(part)))
        found = executable(*arguments, spares)
        self.lent.append((part, found[len(found) - len(spares) :]))
        return found

    def words(self, packed: np.ndarray) -> np.ndarray:
        """The packed input of a step in memory that stays, which is lent likewise."""
        free = self._free[packed.size]
        words = free.pop() if free else _aligned(packed.size)
        words[:] = packed
        self.lent.append((packed.size, words))
        return words

    def give(self, lent: Sequence[tuple[Hashable, Any]]) -> None:
        """Takes back what every step and host has read."""
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
