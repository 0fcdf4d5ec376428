"""The GPU's attention kernel: one warpgroup fetches blocks, the others compute.

    fetch     q q  kv kv kv kv kv  q ...     as far ahead as there are stages, also into the next item
    consume           s w v  s w v           scores, weights, values of one stage after the other

A stage is tile_kv tokens of one KV head, K and V side by side as they stand in the pool. Blocks outside an item's
context are never fetched: the nearest block inside is fetched in their place, and masked. Stages at the ends of a
context are masked and their values cleared, because what lies beyond may be NaN.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.gpu.config import LANES, Divided, Form
from pallas_kernels.paged_attention.gpu.consume import consume
from pallas_kernels.paged_attention.gpu.schedule import Field, GpuSchedule, WorkItems
from pallas_kernels.paged_attention.gpu.shape import Common, Refs, Shape, Task, scratch_of

_FETCHER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # per thread, if three warpgroups share a multiprocessor


def attend(
    queries: jax.Array,  # [tiles, K, groups of lanes, loaded, H] bfloat16
    pool: KVPool,
    schedule: GpuSchedule,
    work: WorkItems,
    form: Form,
    sinks: jax.Array,  # [K, groups of lanes, 64] float32, base 2; LOWEST where there are none
    common: Common,
    *,
    writes: bool = False,
) -> tuple[tuple[jax.Array, ...], KVPool]:
    """Results of the items, and the pool.

    writes: behind the queries of a KV head are K and V of the row's token, which the pool does not have yet.

    Whole contexts: [tiles, K, groups, 64, H] bfloat16, the first V lanes. Splits: [splits, tiles, K, loaded, V]
    float32, each with weights that sum to 1, and the base-2 logarithms of their sums, [splits, tiles, K, loaded].
    """
    P, C = pool.values.shape[:2]
    (tiles, K, groups, _, H), V = queries.shape, pool.value_dim
    shape = Shape(
        form=form,
        programs=schedule.config.programs,
        num_kv_heads=K,
        head_dim=H,
        value_dim=V,
        group=common.group,
        block_size=C,
        rows=min(C, form.tile_kv),
        dtype=pool.dtype,
        scale=common.scale,
        soft_cap=common.soft_cap,
        window=schedule.step.window,
        chunked=schedule.step.chunked,
        causal=schedule.step.causal,
        has_spans=work.last_seen is not None,
        writes=writes,
        ops=common.ops,
    )
    values: Any = pool.values.reshape(P * C // shape.rows, shape.rows, K, H + V)
    values = jax.new_ref(values, memory_space=plgpu.GMEM) if writes else values
    if form.split is None:
        outputs = (jax.ShapeDtypeStruct((tiles, K, groups, LANES, H), jnp.bfloat16),)
    else:
        partial = (work.max_splits * form.rings, tiles, K, form.loaded)
        outputs = (jax.ShapeDtypeStruct((*partial, V), jnp.float32), jax.ShapeDtypeStruct(partial, jnp.float32))
    inputs = [work.num_items, work.items, schedule.block_tables, queries, sinks, values]
    if pool.scales is not None:
        inputs.append(pool.scales.reshape(P, K, 2, C // shape.rows, shape.rows))
    if work.last_seen is not None:
        inputs.append(_by_lane(work.last_seen, form, common.group))
    found = _launch(shape, inputs, outputs, common.interpret)
    written = jax.freeze(values).reshape(pool.values.shape) if writes else pool.values
    return found, dataclasses.replace(pool, values=written)


def _launch(shape: Shape, inputs: list[Any], outputs: tuple[Any, ...], interpret: Any) -> tuple[jax.Array, ...]:
    """The outputs. Pallas's own `kernel`, for Mosaic's takes no references as inputs, which are written in place."""

    def body(*refs: Any) -> None:
        run = functools.partial(_body, shape, refs[: len(inputs)], refs[len(inputs) :])
        pl.run_scoped(run, scratch_of(shape), collective_axes="warpgroup")

    threads: Any = {"num_threads": shape.form.consumers + 1, "thread_name": "warpgroup"}
    launch: Any = pl.kernel(
        body,
        out_type=outputs,
        mesh=plgpu.Mesh(grid=(shape.programs,), grid_names=("program",), **threads),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    return launch(*inputs)


def _by_lane(last_seen: jax.Array, form: Form, group: int) -> jax.Array:  # [tiles, groups, 64] int32
    """The last position that the query of each lane sees."""
    lanes = jnp.repeat(last_seen, group, axis=1)
    lanes = jnp.pad(lanes, ((0, 0), (0, form.lane_groups * LANES - lanes.shape[1])))
    return lanes.reshape(-1, form.lane_groups, LANES)


def _body(shape: Shape, inputs: Any, outputs: Any, scratch: dict[str, Any]) -> None:
    refs, num_items, items = Refs(inputs, outputs, scratch), *inputs[:2]
    form, warpgroup, program = shape.form, lax.axis_index("warpgroup"), lax.axis_index("program")
    work = num_items[0] * shape.num_kv_heads
    rounds, rest = lax.div(work, shape.programs), lax.rem(work, shape.programs)  # `//` minds signs, and costs more

    def turn_of(i: jax.Array) -> jax.Array:
        """The place of this program in a round: every other one goes backwards, so that all have as long contexts."""
        return jnp.where(lax.rem(i, 2) == 0, program, shape.programs - 1 - program)

    mine = rounds + jnp.where(turn_of(rounds) < rest, 1, 0)

    def task_of(i: jax.Array) -> Task:
        """The i-th item of this program; the heads of an item run side by side. The longest contexts come first."""
        place = turn_of(i) + i * shape.programs
        if form.split is None:
            place = work - 1 - place
        index = lax.div(place, shape.num_kv_heads)
        head, fields = lax.rem(place, shape.num_kv_heads), shape.ops.scalars(items, index, len(Field))
        return Task(i, head, dict(zip(Field, fields, strict=True)))

    @pl.when(warpgroup == form.consumers)
    def _() -> None:
        if form.consumers > 1:
            plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
        fetched = (jnp.int32(0),) * form.rings
        fetched = lax.fori_loop(0, mine, lambda i, n: _fetch(shape, refs, task_of(i), n), fetched)
        of_ring = form.stages * form.halves
        barriers = [(mine, "queries_free", 0, form.query_slots)]
        barriers += [(n * form.halves, "stage_free", r * of_ring, of_ring) for r, n in enumerate(fetched)]
        for used, name, first, slots in barriers:
            for slot in range(slots):
                pl.when(used > slot)(functools.partial(plgpu.barrier_wait, refs.scratch[name].at[first + slot]))

    def compute(consumer: int | jax.Array) -> None:
        if form.consumers > 1:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        me = shape.consumer(consumer)
        lax.fori_loop(0, mine, lambda i, n: consume(shape, refs, me, task_of(i), n), jnp.int32(0))

    if form.divided is not Divided.VALUES:
        pl.when(warpgroup < form.consumers)(functools.partial(compute, warpgroup))
        return
    for consumer in range(form.consumers):  # each has code of its own, for columns begin at known places
        pl.when(warpgroup == consumer)(functools.partial(compute, consumer))


def _fetch(shape: Shape, refs: Refs, task: Task, fetched: Any) -> tuple[jax.Array, ...]:
    """Starts the transfers of an item. fetched: stages of each ring before it; returned with the item's own added."""
    form, C, s, (i, head, item) = shape.form, shape.block_size, refs.scratch, task
    _, _, tables, queries, _, values, *others = refs.inputs
    scales = others[: int(shape.has_scales)]
    slot = lax.rem(i, form.query_slots)

    @pl.when(i >= form.query_slots)
    def _() -> None:
        plgpu.barrier_wait(s["queries_free"].at[slot])

    for group in range(form.lane_groups):
        plgpu.copy_gmem_to_smem(
            queries.at[item[Field.TILE], head, group, pl.ds(0, form.loaded)],
            s["queries"].at[slot, group, pl.ds(0, form.loaded)],
            s["queries_ready"].at[slot],
        )
    if shape.writes:
        behind = queries.at[item[Field.TILE], head, 0, pl.ds(shape.group, 2)]
        plgpu.copy_gmem_to_smem(behind, s["new"].at[slot], s["queries_ready"].at[slot])

    def one_stage(tile: jax.Array, fetched: Any) -> Any:
        ring = lax.rem(tile, form.rings) if form.rings > 1 else 0
        n = fetched[0] if form.rings == 1 else jnp.where(ring == 0, *fetched)
        stage = shape.stage_of(n, ring)
        for half, columns in enumerate(shape.arriving):
            place = stage * form.halves + half
            pl.when(n >= form.stages)(functools.partial(plgpu.barrier_wait, s["stage_free"].at[place]))
            for piece in range(form.tile_kv // shape.rows):
                first = piece * shape.rows
                position = lax.clamp(item[Field.OLDEST], tile * form.tile_kv + first, item[Field.HIGH])
                there, ready = shape.place_of(tables, item[Field.ROW], position), s["stage_ready"].at[place]
                plgpu.copy_gmem_to_smem(
                    values.at[there, :, head, pl.ds(columns.start, len(columns))],
                    s["stages"].at[place, pl.ds(first, shape.rows)],
                    ready,
                )
                for ref in scales:
                    block, part = lax.div(there, C // shape.rows), lax.rem(there, C // shape.rows)
                    plgpu.copy_gmem_to_smem(ref.at[block, head, :, part], s["scales"].at[place, piece], ready)
        return (n + 1,) if form.rings == 1 else (fetched[0] + 1 - ring, fetched[1] + ring)

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, fetched)
