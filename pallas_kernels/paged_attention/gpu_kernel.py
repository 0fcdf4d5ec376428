"""The GPU's attention kernel: one warpgroup fetches blocks, the others multiply and weigh.

    fetch     q q  kv kv kv kv kv  q ...     as far ahead as there are stages, over the ends of items too
    consume           s w v  s w v           scores, weights, values of one stage after the other

A stage is tile_kv tokens of one KV head, K and V side by side as they stand in the pool. Blocks outside of an item's
context are never fetched: in their place the nearest inside is, and masked. Stages at the ends of a context are masked
and their values cleared, for what lies beyond may be NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention import gpu_math as m
from pallas_kernels.paged_attention.gpu_config import LANES, Form
from pallas_kernels.paged_attention.gpu_ops import MATRIX, PER_LANE, PER_TOKEN, SMALL, Ops
from pallas_kernels.paged_attention.gpu_schedule import Field, GpuSchedule, Work

_FETCHER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of a thread, where three warpgroups share a multiprocessor
_SWIZZLES = (128, 64, 32)  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static in a launch. rows: of a block or a part of one, that one transfer brings."""

    form: Form
    programs: int
    num_kv_heads: int
    head_dim: int
    group: int
    block_size: int
    rows: int
    dtype: jnp.dtype
    scale: float
    soft_cap: float | None
    window: int | None
    causal: bool
    ops: Ops

    @property
    def is_converted(self) -> bool:
        """Whether K and V are made bfloat16 before they are multiplied."""
        return self.dtype.itemsize == 1

    @property
    def width(self) -> int:
        """Lanes of a head dim that are rewritten at once: more would take registers that the results are in."""
        return 32 if self.head_dim % 64 else 64

    @property
    def has_scales(self) -> bool:
        """Whether each token's K and V have a factor."""
        return self.dtype == jnp.int8


def attend(
    queries: jax.Array,  # [tiles, K, consumers, loaded, H] bfloat16
    pool: KVPool,
    schedule: GpuSchedule,
    work: Work,
    form: Form,
    sinks: jax.Array,  # [K, consumers, 64] float32, base 2; LOWEST where there are none
    *,
    group: int,
    scale: float,
    soft_cap: float | None,
    ops: Ops,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Results of the items.

    Whole contexts: [tiles, K, consumers, 64, H] bfloat16. Splits: [splits, tiles, K, loaded, H] float32, each with
    weights that sum to 1, and the base-2 logarithms of their sums, [splits, tiles, K, loaded].
    """
    P, C = pool.values.shape[:2]
    tiles, K, _, _, H = queries.shape
    shape = Shape(
        form=form,
        programs=schedule.config.programs,
        num_kv_heads=K,
        head_dim=H,
        group=group,
        block_size=C,
        rows=min(C, form.tile_kv),
        dtype=pool.dtype,
        scale=scale,
        soft_cap=soft_cap,
        window=schedule.window,
        causal=schedule.causal,
        ops=ops,
    )
    values = pool.values.reshape(P * C // shape.rows, shape.rows, K, 2 * H)
    if form.split is None:
        outputs = (jax.ShapeDtypeStruct((tiles, K, form.consumers, LANES, H), jnp.bfloat16),)
    else:
        partial = (work.max_splits, tiles, K, form.loaded)
        outputs = (jax.ShapeDtypeStruct((*partial, H), jnp.float32), jax.ShapeDtypeStruct(partial, jnp.float32))
    inputs = [work.num_items, work.items, schedule.block_tables, queries, sinks, values]
    if pool.scales is not None:
        inputs.append(pool.scales.reshape(P, K, 2, C))
    launch = plgpu.kernel(
        lambda *refs: _body(shape, refs[: len(inputs)], refs[len(inputs) : -1], refs[-1]),
        out_type=outputs,
        scratch_types=[_scratch(shape)],
        grid=(shape.programs,),
        grid_names=("program",),
        num_threads=form.consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return launch(*inputs)


def _swizzled(shape: tuple[int, ...], dtype: Any, lanes: int | None = None) -> Any:
    """Shared memory that wgmma reads, swizzled over as many bytes as divide the minor dimension."""
    bytes_ = jnp.dtype(dtype).itemsize
    swizzle = next(s for s in _SWIZZLES if (lanes or shape[-1]) * bytes_ % s == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // bytes_)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(shape: Shape) -> dict[str, Any]:
    form, H, T = shape.form, shape.head_dim, shape.form.tile_kv
    arrivals = T // shape.rows * (3 if shape.has_scales else 1)
    scratch = {
        "queries": _swizzled((form.query_slots, form.consumers, LANES, H), jnp.bfloat16),
        "stages": _swizzled((form.stages, T, 2 * H), shape.dtype, lanes=shape.width),
        "queries_ready": plgpu.Barrier(num_arrivals=form.consumers, num_barriers=form.query_slots),
        "queries_free": plgpu.Barrier(num_arrivals=form.consumers, num_barriers=form.query_slots),
        "stage_ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=form.stages),
        "stage_free": plgpu.Barrier(num_arrivals=form.consumers, num_barriers=form.stages),
    }
    if form.consumers > 1:
        scratch["together"] = plgpu.Barrier(num_arrivals=form.consumers)
    if form.split is not None:
        scratch["result"] = plgpu.SMEM((LANES, form.part), jnp.float32)
        scratch["sums"] = plgpu.SMEM((LANES,), jnp.float32)
    if shape.is_converted:
        scratch["converted"] = _swizzled((T, 2 * H), jnp.bfloat16, lanes=shape.width)
    if shape.has_scales:
        scratch["scales"] = plgpu.SMEM((form.stages, 2, T), jnp.float32)
    return scratch


def _body(shape: Shape, inputs: Any, outputs: Any, scratch: dict[str, Any]) -> None:
    num_items, items = inputs[:2]
    form, warpgroup, program = shape.form, lax.axis_index("warpgroup"), lax.axis_index("program")
    work = num_items[0] * shape.num_kv_heads
    mine = (work - program + shape.programs - 1) // shape.programs

    def item_of(i: jax.Array) -> tuple[jax.Array, jax.Array, dict[Field, jax.Array]]:
        """The i-th item of this program; the heads of an item run side by side. The longest contexts come first."""
        place = program + i * shape.programs
        if form.split is None:
            place = work - 1 - place
        index = place // shape.num_kv_heads
        return i, place % shape.num_kv_heads, dict(zip(Field, shape.ops.scalars(items, index, len(Field)), strict=True))

    @pl.when(warpgroup == form.consumers)
    def _() -> None:
        if form.consumers > 1:
            plgpu.set_max_registers(_FETCHER_REGISTERS, action="decrease")
        n = lax.fori_loop(0, mine, lambda i, n: _fetch(shape, inputs, scratch, *item_of(i), n), jnp.int32(0))
        for used, name, slots in ((mine, "queries_free", form.query_slots), (n, "stage_free", form.stages)):
            for slot in range(slots):
                pl.when(used > slot)(functools.partial(plgpu.barrier_wait, scratch[name].at[slot]))

    @pl.when(warpgroup < form.consumers)
    def _() -> None:
        if form.consumers > 1:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        lax.fori_loop(
            0, mine, lambda i, n: _consume(shape, inputs, outputs, scratch, warpgroup, *item_of(i), n), jnp.int32(0)
        )


def _fetch(
    shape: Shape, inputs: Any, s: dict[str, Any], i: jax.Array, head: jax.Array, item: dict[Field, jax.Array], n: Any
) -> jax.Array:
    """Starts the transfers of an item; n: stages before it. Returns n with its own."""
    form, C = shape.form, shape.block_size
    _, _, tables, queries, _, values, *scales = inputs
    slot = lax.rem(i, form.query_slots)

    @pl.when(i >= form.query_slots)
    def _() -> None:
        plgpu.barrier_wait(s["queries_free"].at[slot])

    for consumer in range(form.consumers):
        plgpu.copy_gmem_to_smem(
            queries.at[item[Field.TILE], head, consumer],
            s["queries"].at[slot, consumer, pl.ds(0, form.loaded)],
            s["queries_ready"].at[slot],
        )

    def one_stage(tile: jax.Array, n: jax.Array) -> jax.Array:
        stage = lax.rem(n, form.stages)

        @pl.when(n >= form.stages)
        def _() -> None:
            plgpu.barrier_wait(s["stage_free"].at[stage])

        for first in range(0, form.tile_kv, shape.rows):
            position = lax.clamp(item[Field.OLDEST], tile * form.tile_kv + first, item[Field.HIGH])
            block = tables[item[Field.ROW], position // C]
            part = position % C // shape.rows
            there = pl.ds(first, shape.rows)
            ready = s["stage_ready"].at[stage]
            plgpu.copy_gmem_to_smem(
                values.at[block * (C // shape.rows) + part, :, head], s["stages"].at[stage, there], ready
            )
            for kind, ref in enumerate(scales * 2):
                if shape.rows == C:
                    source = ref.at[block, head, kind]
                else:
                    source = ref.at[block, head, kind, pl.ds(part * shape.rows, shape.rows)]
                plgpu.copy_gmem_to_smem(source, s["scales"].at[stage, kind, there], ready)
        return n + 1

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, n)


def _consume(
    shape: Shape,
    inputs: Any,
    outputs: Any,
    s: dict[str, Any],
    consumer: jax.Array,
    i: jax.Array,
    head: jax.Array,
    item: dict[Field, jax.Array],
    n: jax.Array,
) -> jax.Array:
    """Computes an item; n: stages before it. Returns n with its own."""
    form, ops, H = shape.form, shape.ops, shape.head_dim
    slot = lax.rem(i, form.query_slots)
    queries = s["queries"].at[slot, consumer]
    lane = ops.iota((LANES,), 0, PER_LANE) + consumer * LANES
    query = item[Field.LOW] + lane // shape.group
    plgpu.barrier_wait(s["queries_ready"].at[slot])

    def one_stage(tile: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, (highest, total, parts) = carry
        stage = lax.rem(n, form.stages)
        plgpu.barrier_wait(s["stage_ready"].at[stage])
        begin = tile * form.tile_kv
        keys_values = _readable(shape, s, stage, consumer, begin, item, is_edge)
        scores = ops.scores(queries, keys_values.at[:, pl.ds(0, H)])
        if shape.has_scales:
            scores *= _scales(shape, s, stage, 0)
        logits = m.logits(scores, shape.scale, shape.soft_cap)
        if is_edge:
            logits = jnp.where(_visible(shape, query, item, begin), logits, -jnp.inf)
        highest, total, kept, weights = m.weigh(highest, total, logits)
        if shape.has_scales:
            scales = _scales(shape, s, stage, 1)
            weights = jnp.where(weights > 0, weights * scales, jnp.zeros_like(weights)) if is_edge else weights * scales
        weights = weights.astype(jnp.bfloat16)
        done = []
        for p, part in enumerate(parts):
            values = keys_values.at[:, pl.ds(H + p * form.part, form.part)]
            done.append(ops.accumulate(part * m.columns(kept, part.shape), weights, values))
        ops.end_reading(is_by_threads=shape.is_converted)
        plgpu.barrier_arrive(s["stage_free"].at[stage])
        return n + 1, (highest, total, tuple(done))

    state = _empty(shape, inputs, head, consumer)
    first, end = item[Field.FIRST_KV], item[Field.END_KV]
    first_full = jnp.clip(item[Field.FIRST_FULL], first, end)
    end_full = jnp.clip(item[Field.END_FULL], first_full, end)
    carry = (n, state)
    if shape.window is not None:
        carry = lax.fori_loop(first, first_full, lambda j, c: one_stage(j, c, True), carry)
    carry = lax.fori_loop(first_full, end_full, lambda j, c: one_stage(j, c, False), carry)
    n, state = lax.fori_loop(end_full, end, lambda j, c: one_stage(j, c, True), carry)
    if form.split is None:
        _store_whole(shape, outputs, s, consumer, slot, head, item, state)
    else:
        ops.end_reading(is_by_threads=False)
        plgpu.barrier_arrive(s["queries_free"].at[slot])
        _store_partial(shape, outputs, s, head, item, state)
    return n


def _scales(shape: Shape, s: dict[str, Any], stage: jax.Array, kind: int) -> jax.Array:  # [64, T]
    """Those of the stage's K or V, in every lane."""
    scales = shape.ops.load(s["scales"].at[stage, kind], PER_TOKEN)
    return lax.broadcast_in_dim(scales, (LANES, shape.form.tile_kv), [1])


def _empty(shape: Shape, inputs: Any, head: jax.Array, consumer: jax.Array) -> m.State:
    """The state before the first stage; a sink is a weight without a value, which a split leaves to the merge."""
    form, ops = shape.form, shape.ops
    parts = tuple(ops.full((LANES, form.part), 0.0, MATRIX) for _ in range(shape.head_dim // form.part))
    if form.split is not None:
        return ops.full((LANES,), m.LOWEST, PER_LANE), ops.full((LANES,), 0.0, PER_LANE), parts
    highest = ops.load(inputs[4].at[head, consumer], PER_LANE)
    return highest, jnp.where(highest > m.LOWEST, jnp.ones_like(highest), jnp.zeros_like(highest)), parts


def _visible(shape: Shape, query: jax.Array, item: dict[Field, jax.Array], begin: jax.Array) -> jax.Array:
    """[64, T] bool: which tokens of the stage each query sees."""
    tile = (LANES, shape.form.tile_kv)
    position = shape.ops.iota(tile, 1, MATRIX) + begin
    if not shape.causal:
        return position <= item[Field.HIGH]
    query = m.columns(query, tile)
    visible = position <= query
    return visible if shape.window is None else visible & (position > query - shape.window)


def _readable(
    shape: Shape,
    s: dict[str, Any],
    stage: jax.Array,
    consumer: jax.Array,
    begin: jax.Array,
    item: dict[Field, jax.Array],
    is_edge: bool,
) -> Any:  # a ref [T, 2H]
    """The stage's K and V as wgmma reads them; at an edge, the values that no query sees are zero."""
    ref = s["stages"].at[stage]
    if shape.is_converted:
        _meet(shape, s)  # what was converted last is multiplied
        into = s["converted"]
    else:
        into = ref
    for kind in range(2):  # K by the first consumer, V by the last, which where there is one is the same
        if shape.is_converted or (kind == 1 and is_edge):
            clear = kind == 1 and is_edge
            is_mine = consumer == kind * (shape.form.consumers - 1)
            pl.when(is_mine)(functools.partial(_rewrite, shape, ref, into, kind, begin, item if clear else None))
    if shape.is_converted or is_edge:
        _meet(shape, s)
    return into


def _meet(shape: Shape, s: dict[str, Any]) -> None:
    """Every consumer has come here."""
    if shape.form.consumers > 1:
        plgpu.barrier_arrive(s["together"])
        plgpu.barrier_wait(s["together"])


def _rewrite(
    shape: Shape, ref: Any, into: Any, kind: int, begin: jax.Array, item: dict[Field, jax.Array] | None
) -> None:
    """A stage's K or V, in bfloat16; where an item is given, tokens that none of its queries sees are zero."""
    ops, H = shape.ops, shape.head_dim
    layout = SMALL if shape.is_converted else MATRIX
    for first in range(kind * H, (kind + 1) * H, shape.width):
        columns = pl.ds(first, shape.width)
        values = ops.load(ref.at[:, columns], layout)
        if shape.dtype.itemsize == 1 and not shape.has_scales:  # the chip converts float8 to float16 alone
            values = values.astype(jnp.float16).astype(jnp.float32)
        values = values.astype(jnp.bfloat16)
        if item is not None:
            position = ops.iota(values.shape, 0, layout) + begin
            is_seen = (position >= item[Field.OLDEST]) & (position <= item[Field.HIGH])
            values = jnp.where(is_seen, values, jnp.zeros_like(values))
        into[:, columns] = values
    plgpu.commit_smem()


def _store_whole(
    shape: Shape,
    outputs: Any,
    s: dict[str, Any],
    consumer: jax.Array,
    slot: jax.Array,
    head: jax.Array,
    item: dict[Field, jax.Array],
    state: m.State,
) -> None:
    """An item's results, by way of the shared memory where its queries were."""
    form, (_, total, parts) = shape.form, state
    there = s["queries"].at[slot, consumer]
    inverse = 1.0 / jnp.where(total > 0, total, jnp.ones_like(total))
    for p, part in enumerate(parts):
        columns = pl.ds(p * form.part, form.part)
        there[:, columns] = (part * m.columns(inverse, part.shape)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(there, outputs[0].at[item[Field.TILE], head, consumer])
    plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(s["queries_free"].at[slot])


def _store_partial(
    shape: Shape, outputs: Any, s: dict[str, Any], head: jax.Array, item: dict[Field, jax.Array], state: m.State
) -> None:
    """A split's results; only the lanes that are some head's."""
    form, (highest, total, parts) = shape.form, state
    results, sums = outputs
    at = (item[Field.SPLIT], item[Field.TILE], head)
    inverse = 1.0 / total
    lanes = pl.ds(0, form.loaded)
    s["sums"][...] = highest + jnp.log(total) * m.LOG2_E
    for p, part in enumerate(parts):
        s["result"][...] = part * m.columns(inverse, part.shape)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s["result"].at[lanes], results.at[(*at, slice(None), pl.ds(p * form.part, form.part))])
        if p == 0:
            plgpu.copy_smem_to_gmem(s["sums"].at[lanes], sums.at[at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
