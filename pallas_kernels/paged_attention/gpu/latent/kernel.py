"""The GPU's attention kernel over latents: one warpgroup fetches blocks, one or two compute for the heads of a row.

One vector of a token is the key of every head, and its first values are every head's value: a stage is fetched once
and multiplied twice.

    fetch      q  kv kv kv kv kv  q ...      as far ahead as there are stages, also into the next item
    consume         s w v  s w v  ...        scores, weights, values of one stage after the other

Blocks outside an item's context are never fetched, and stages at its ends are masked and their values cleared, as in
the other kernel. How stages are multiplied depends on how many heads there are.
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
from pallas_kernels.paged_attention.gpu.latent import few_heads, many_heads
from pallas_kernels.paged_attention.gpu.latent.latent_shape import LatentShape
from pallas_kernels.paged_attention.gpu.schedule import Field, GpuSchedule
from pallas_kernels.paged_attention.gpu.shape import Common, Refs, Task

_FETCHER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # per thread, if three warpgroups share a multiprocessor


def attend(
    queries: jax.Array,  # [T, groups, loaded, V + rope] bfloat16
    pool: KVPool,
    schedule: GpuSchedule,
    common: Common,
    *,
    rows: int,
) -> tuple[jax.Array, jax.Array]:
    """Results of the splits in float32, each with weights that sum to 1, and the base-2 logarithms of their sums.

    As `results_of` of the form has them, for `rows` rows: those of the schedule, and others where nothing is stored.
    """
    (P, C, _, lanes), V = pool.values.shape, pool.value_dim
    work, form = schedule.decode, schedule.config.decode
    heads = few_heads if form.consumers == 1 else many_heads
    shape = LatentShape(
        form=form,
        programs=schedule.config.programs,
        groups=queries.shape[1],
        value_dim=V,
        rope_dim=lanes - V,
        block_size=C,
        rows=min(C, form.tile_kv // form.consumers),
        scale=common.scale,
        soft_cap=common.soft_cap,
        window=schedule.window,
        ops=common.ops,
    )
    inputs = [
        work.num_items,
        work.items,
        schedule.block_tables,
        work.tokens[:, 0],
        queries,
        from_bits(pool.values, pool).reshape(P * C // shape.rows, shape.rows, lanes),
    ]
    launch = plgpu.kernel(
        lambda *refs: _body(shape, heads, Refs(refs[: len(inputs)], refs[len(inputs) : -1], refs[-1])),
        out_type=heads.results_of(shape, work.max_splits, rows),
        scratch_types=[heads.scratch_of(shape)],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=form.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=heads.REDUCTION_BYTES),
        interpret=common.interpret,
    )
    return launch(*inputs)


def _body(shape: LatentShape, heads: Any, refs: Refs) -> None:
    num_items, items = refs.inputs[:2]
    form, warpgroup, program = shape.form, lax.axis_index("warpgroup"), lax.axis_index("program")
    work = num_items[0] * shape.groups
    rounds, rest = lax.div(work, shape.programs), lax.rem(work, shape.programs)

    def turn_of(i: jax.Array) -> jax.Array:
        """The place of this program in a round; every other round goes backwards."""
        return jnp.where(lax.rem(i, 2) == 0, program, shape.programs - 1 - program)

    mine = rounds + jnp.where(turn_of(rounds) < rest, 1, 0)

    def task_of(i: jax.Array) -> Task:
        """The i-th item of this program; the groups of an item run side by side, so that one finds its blocks in L2."""
        place = turn_of(i) + i * shape.programs
        fields = shape.ops.scalars(items, lax.div(place, shape.groups), len(Field))
        return Task(i, lax.rem(place, shape.groups), dict(zip(Field, fields, strict=True)))

    @pl.when(warpgroup == form.consumers)
    def _() -> None:
        if form.consumers > 1:
            plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
        n = lax.fori_loop(0, mine, lambda i, n: heads.fetch(shape, refs, task_of(i), n), jnp.int32(0))
        for used, name, slots in heads.slots_of(shape, mine, n):
            for slot in range(slots):
                pl.when(used > slot)(functools.partial(plgpu.barrier_wait, refs.scratch[name].at[slot]))

    for w in range(form.consumers):  # each has code of its own

        @pl.when(warpgroup == w)
        def _(w: int = w) -> None:
            if form.consumers > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            lax.fori_loop(0, mine, lambda i, n: heads.consume(shape, refs, w, task_of(i), n), jnp.int32(0))
