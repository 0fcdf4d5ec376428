"""The GPU's attention kernel over latents: one warpgroup fetches blocks, two compute for up to 64 heads of a row.

One vector of a token is the key of every head, and its first values are every head's value: a stage is fetched once
and multiplied twice. The sums of 64 heads are more than one warpgroup's registers hold, so each of two has half of a
latent's values, and scores half of a stage's tokens; weights cross in shared memory.

    fetch      q  kv kv kv kv kv  q ...      as far ahead as there are stages, also into the next item
    consume         s m w v  s m w v         scores of own tokens, the highest of both, weights, values of own half

Blocks outside an item's context are never fetched, as in the other kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent.consume import consume
from pallas_kernels.paged_attention.gpu.latent.shape import HALVES, LatentShape, scratch_of
from pallas_kernels.paged_attention.gpu.schedule import Field, GpuSchedule
from pallas_kernels.paged_attention.gpu.shape import Common, Refs, Task

_FETCHER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # per thread
_REDUCTION_BYTES = 128  # the compiler's own, of reductions across warps, which there are none of; the least that it takes


def attend(
    queries: jax.Array,  # [R, groups, loaded, V + rope] bfloat16
    pool: KVPool,
    schedule: GpuSchedule,
    common: Common,
) -> tuple[jax.Array, jax.Array]:
    """Results of the splits, [splits, R, groups, 2, 64, V / 2] float32, each with weights that sum to 1.

    And the base-2 logarithms of their sums, [splits, R, groups, 2, 64], the same for both halves. Lanes from `loaded`
    on may be anything.
    """
    (P, C, _, lanes), V = pool.values.shape, pool.value_dim
    R, groups = queries.shape[:2]
    work, form = schedule.decode, schedule.config.decode
    shape = LatentShape(
        form=form,
        programs=schedule.config.programs,
        groups=groups,
        value_dim=V,
        rope_dim=lanes - V,
        block_size=C,
        rows=min(C, form.tile_kv // HALVES),
        scale=common.scale,
        soft_cap=common.soft_cap,
        window=schedule.window,
        ops=common.ops,
    )
    partial = (work.max_splits, R, groups, HALVES, LANES)
    inputs = [
        work.num_items,
        work.items,
        schedule.block_tables,
        queries,
        from_bits(pool.values, pool).reshape(P * C // shape.rows, shape.rows, lanes),
    ]
    launch = plgpu.kernel(
        lambda *refs: _body(shape, Refs(refs[: len(inputs)], refs[len(inputs) : -1], refs[-1])),
        out_type=(
            jax.ShapeDtypeStruct((*partial, V // HALVES), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ),
        scratch_types=[scratch_of(shape)],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=HALVES + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=_REDUCTION_BYTES),
        interpret=common.interpret,
    )
    return launch(*inputs)


def _body(shape: LatentShape, refs: Refs) -> None:
    num_items, items = refs.inputs[:2]
    form, warpgroup, program = shape.form, lax.axis_index("warpgroup"), lax.axis_index("program")
    work = num_items[0] * shape.groups
    mine = (work - program + shape.programs - 1) // shape.programs

    def task_of(i: jax.Array) -> Task:
        """The i-th item of this program; the groups of an item run side by side, so that one finds its blocks in L2."""
        place = program + i * shape.programs
        fields = shape.ops.scalars(items, place // shape.groups, len(Field))
        return Task(i, place % shape.groups, dict(zip(Field, fields, strict=True)))

    @pl.when(warpgroup == HALVES)
    def _() -> None:
        plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
        n = lax.fori_loop(0, mine, lambda i, n: _fetch(shape, refs, task_of(i), n), jnp.int32(0))
        pl.when(mine > 0)(functools.partial(plgpu.barrier_wait, refs.scratch["queries_free"]))
        for stage in range(form.stages):
            pl.when(n > stage)(functools.partial(plgpu.barrier_wait, refs.scratch["stage_free"].at[stage]))

    @pl.when(warpgroup < HALVES)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        lax.fori_loop(0, mine, lambda i, n: consume(shape, refs, warpgroup, task_of(i), n), jnp.int32(0))


def _fetch(shape: LatentShape, refs: Refs, task: Task, n: Any) -> jax.Array:
    """Starts the transfers of an item. n: stages before it; returned with the item's own added."""
    form, C, s, (i, group, item) = shape.form, shape.block_size, refs.scratch, task
    _, _, tables, queries, latents = refs.inputs
    pl.when(i > 0)(functools.partial(plgpu.barrier_wait, s["queries_free"]))
    plgpu.copy_gmem_to_smem(
        queries.at[item[Field.TILE], group], s["queries"].at[pl.ds(0, form.loaded)], s["queries_ready"]
    )

    def one_stage(tile: jax.Array, n: jax.Array) -> jax.Array:
        stage = lax.rem(n, form.stages)
        ready = s["stage_ready"].at[stage]

        @pl.when(n >= form.stages)
        def _() -> None:
            plgpu.barrier_wait(s["stage_free"].at[stage])

        for first in range(0, form.tile_kv, shape.rows):
            position = lax.clamp(item[Field.OLDEST], tile * form.tile_kv + first, item[Field.HIGH])
            block = tables[item[Field.ROW], position // C]
            source = latents.at[block * (C // shape.rows) + position % C // shape.rows]
            share, there = first // shape.share, pl.ds(first % shape.share, shape.rows)
            for half in range(HALVES):
                columns = pl.ds(half * shape.half, shape.half)
                plgpu.copy_gmem_to_smem(source.at[:, columns], s["values"].at[stage, share, half, there], ready)
            columns = pl.ds(shape.value_dim, shape.rope_dim)
            plgpu.copy_gmem_to_smem(source.at[:, columns], s["ropes"].at[stage, share, there], ready)
        return n + 1

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, n)
