"""Decode attention over latents: the heads of a row in groups of lanes, and the merge of its splits.

One vector of a token is the key of every head, and its first values are every head's value: a stage is fetched once
and multiplied twice. One warpgroup fetches blocks, one or two compute, as `few_heads` or `many_heads`:

    fetch      q  kv kv kv kv kv  q ...      as far ahead as there are stages, also into the next item
    consume         s w v  s w v  ...        scores, weights, values of one stage after the other

Blocks outside an item's context are never fetched; stages at its ends are masked and their values cleared.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.kv_write import kv_write
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu import merge_splits
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent import few_heads, many_heads
from pallas_kernels.paged_attention.gpu.latent.latent_shape import LatentShape
from pallas_kernels.paged_attention.gpu.ops import Ops
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
        window=schedule.step.window,
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


def latent_attention(
    q: jax.Array,  # [T, N, V + rope] bfloat16
    k: jax.Array,  # [T, 1, V]
    v: jax.Array,  # [T, 1, rope]
    pool: KVPool,
    schedule: GpuSchedule,
    logits: Logits,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, KVPool]:  # [T, N, V]; the pool with k and v
    """See the package's paged_attention. Raises ValueError for queries that are not bfloat16."""
    if q.dtype != jnp.bfloat16:
        raise ValueError(f"q is {q.dtype.name}; 'mosaic_gpu' multiplies bfloat16; take implementation 'xla'")
    pool = kv_write(pool, k, v, schedule.write_blocks, schedule.write_offsets, implementation="mosaic_gpu")
    N, sinks = q.shape[1], logits.sinks
    common = Common(
        group=N,
        scale=logits.scale,
        soft_cap=logits.soft_cap,
        ops=Ops(is_interpreted=bool(interpret)),
        interpret=interpret,
    )
    lane_sinks = jnp.full((N,), m.LOWEST) if sinks is None else sinks.astype(jnp.float32) * m.LOG2_E
    return _decode(q, pool, schedule, lane_sinks, common), pool


def _decode(
    q: jax.Array, pool: KVPool, schedule: GpuSchedule, sinks: jax.Array, common: Common
) -> jax.Array:  # [T, N, V], zero for tokens of other rows
    work, loaded = schedule.decode, schedule.config.decode.loaded
    (T, N, lanes), V, R = q.shape, pool.value_dim, work.tokens.shape[0]
    groups = -(-N // loaded)
    step = LANES // math.gcd(LANES, groups * loaded)  # rows whose heads fill groups of lanes in the merge
    rows, pad = -(-R // step) * step, groups * loaded - N
    queries = jnp.pad(q, ((0, 0), (0, pad), (0, 0))).reshape(T, groups, loaded, lanes)
    results, sums = attend(queries, pool, schedule, common, rows=rows)
    splits, *of_lanes, width = results.shape  # rows, groups, halves of the values if they are apart, lanes
    spread, wide = [1] * (len(of_lanes) - 3), of_lanes[-1] - loaded
    num_splits = jnp.pad(work.num_splits, (0, rows - R)).reshape(rows, *[1] * (len(of_lanes) - 1))
    num_splits = jnp.where(jnp.arange(of_lanes[-1]) < loaded, num_splits, 0)
    sinks = jnp.pad(sinks, (0, pad), constant_values=m.LOWEST).reshape(groups, loaded)
    sinks = jnp.pad(sinks, ((0, 0), (0, wide)), constant_values=m.LOWEST).reshape(groups, *spread, loaded + wide)
    merged = merge_splits.merge(
        results.reshape(splits, -1, width),
        sums.reshape(splits, -1),
        jnp.broadcast_to(num_splits, of_lanes).reshape(-1),
        jnp.broadcast_to(sinks, of_lanes).reshape(-1),
        ops=common.ops,
        interpret=common.interpret,
    )
    by_row = merged.reshape(rows, groups, V // width, -1, width)[:, :, :, :loaded].transpose(0, 1, 3, 2, 4)
    by_row = by_row.reshape(rows, groups * loaded, V)[:, :N]
    return jnp.where(work.is_mine[:, None, None], by_row[work.tiles], jnp.zeros((), q.dtype))
