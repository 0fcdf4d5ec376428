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
    queries: jax.Array,  # [T, groups, loaded, V + rope] bfloat16
    pool: KVPool,
    schedule: GpuSchedule,
    common: Common,
) -> tuple[jax.Array, jax.Array]:
    """Results of the splits, [splits, R, groups, 2, 64, V / 2] float32, each with weights that sum to 1.

    And the base-2 logarithms of their sums, [splits, R, groups, 2, 64], the same for both halves. Lanes from `loaded`
    on may be anything.
    """
    (P, C, _, lanes), V = pool.values.shape, pool.value_dim
    work, form = schedule.decode, schedule.config.decode
    R, groups = work.tokens.shape[0], queries.shape[1]
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
        work.tokens[:, 0],
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
        for slot in range(form.stages * HALVES):
            for name in ("own_free", "rest_free"):
                pl.when(n > slot // HALVES)(functools.partial(plgpu.barrier_wait, refs.scratch[name].at[slot]))

    @pl.when(warpgroup < HALVES)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        lax.fori_loop(0, mine, lambda i, n: consume(shape, refs, warpgroup, task_of(i), n), jnp.int32(0))


def _fetch(shape: LatentShape, refs: Refs, task: Task, n: Any) -> jax.Array:
    """Starts the transfers of an item. n: stages before it; returned with the item's own added."""
    form, C, s, (i, group, item) = shape.form, shape.block_size, refs.scratch, task
    _, _, tables, tokens, queries, latents = refs.inputs
    pl.when(i > 0)(functools.partial(plgpu.barrier_wait, s["queries_free"]))
    lanes, query = pl.ds(0, form.loaded), queries.at[tokens[item[Field.ROW]], group]
    for half in range(HALVES):
        there = s["queries"].at[0, half, lanes]
        plgpu.copy_gmem_to_smem(query.at[:, shape.columns(half)], there, s["queries_ready"])
    plgpu.copy_gmem_to_smem(query.at[:, shape.rope_columns], s["rope_queries"].at[0, lanes], s["queries_ready"])

    def one_stage(tile: jax.Array, n: jax.Array) -> jax.Array:
        stage = shape.stage_of(n)
        sources = [_source(shape, latents, tables, item, tile * form.tile_kv + first) for first in shape.pieces]
        for part in ("own", "rest"):
            for share in range(HALVES):
                slot = stage * HALVES + share
                ready, free = s[f"{part}_ready"].at[slot], s[f"{part}_free"].at[slot]
                pl.when(n >= form.stages)(functools.partial(plgpu.barrier_wait, free))
                half = share if part == "own" else 1 - share
                for first in range(0, shape.share, shape.rows):
                    source, there = sources[(share * shape.share + first) // shape.rows], pl.ds(first, shape.rows)
                    values = s["values"].at[stage, share, half, there]
                    plgpu.copy_gmem_to_smem(source.at[:, shape.columns(half)], values, ready)
                    if part == "rest":
                        ropes = s["ropes"].at[stage, share, there]
                        plgpu.copy_gmem_to_smem(source.at[:, shape.rope_columns], ropes, ready)
        return n + 1

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, n)


def _source(shape: LatentShape, latents: Any, tables: Any, item: dict[Field, jax.Array], position: Any) -> Any:
    """The rows of the pool with the tokens from a position on, or the nearest inside the context."""
    C, rows = shape.block_size, shape.rows
    position = lax.clamp(item[Field.OLDEST], position, item[Field.HIGH])
    return latents.at[tables[item[Field.ROW], position // C] * (C // rows) + position % C // rows]
