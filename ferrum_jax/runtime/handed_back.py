"""Handed back: what a part of a step gives lies where the results of an earlier step lay, which nobody reads any more.

A part takes pools, which it writes in place, and gives them with results. Each result is written into an array like it
that the call is given behind its other arguments: so no step allocates, and addresses stay. `dispatched.Spares` has
these arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ferrum_jax.models.sharding import crosses_processes, formats, on_mesh, partitions
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime.buckets import Bucket, DraftBucket, LaunchBucket, RowBucket
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.sampling import RESULT_WORDS
from ferrum_jax.runtime.step_options import StepOptions, compiler_options, expert_dtype

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
    """The shapes of a part's results, in the order in which they follow its pools."""

    def rows(count: int, width: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return result(mesh, (count, width), dtype, "rows")

    if isinstance(part, DraftBucket):
        return (rows(part.num_places, 1),)
    words = RESULT_WORDS + (pools.masks.shape[1] if options.gives_masks else 0)
    if isinstance(part, RowBucket):
        return rows(part.num_rows, words), rows(part.num_rows, pools.hidden.shape[1], pools.hidden.dtype)
    bucket = part if isinstance(part, Bucket) else part.forward
    drawn = () if isinstance(part, Bucket) else (rows(bucket.num_rows * part.horizon, words),)
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
    decodes: bool = False,
) -> jax.stages.Traced:
    """A part of a step on a mesh, ready to be lowered: one program that every device runs on its own.

    part: (*arguments) to (the arguments at `pools`, *results). The program takes an array like each result behind the
    arguments, as one tuple; these and the pools are donated. keeps: False for results that are new in each call.
    decodes: as `compiler_options` has it.
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
        compiler_options=compiler_options(options, decodes=decodes),
    )
    return jitted.trace(*given)
