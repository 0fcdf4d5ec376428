"""The warpgroups of the GPU's attention kernel that compute: scores, softmax weights and values of each stage."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.ops import MATRIX, PER_LANE, PER_TOKEN, SMALL
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import Refs, Shape, Task


def consume(shape: Shape, refs: Refs, consumer: jax.Array, task: Task, n: jax.Array) -> jax.Array:
    """Computes an item. n: stages before it; returned with the item's own added."""
    (inputs, outputs, s), (i, head, item) = refs, task
    form, ops, H = shape.form, shape.ops, shape.head_dim
    slot = lax.rem(i, form.query_slots)
    queries = s["queries"].at[slot, consumer]
    plgpu.barrier_wait(s["queries_ready"].at[slot])

    def one_stage(tile: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, (highest, total, parts) = carry
        stage = lax.rem(n, form.stages)
        plgpu.barrier_wait(s["stage_ready"].at[stage])
        begin = tile * form.tile_kv
        keys_values = _readable(shape, s, stage, consumer, begin, item, is_edge)
        turn = _nothing if is_edge or not shape.alternates else functools.partial(_take_turn, s)
        scores = ops.scores(queries, keys_values.at[:, pl.ds(0, H)], turn)
        if shape.has_scales:
            scores *= _scales(shape, s, stage, 0)
        logits = m.logits(scores, shape.scale, shape.soft_cap)
        if is_edge:
            logits = jnp.where(_visible(shape, consumer, item, begin, last), logits, -jnp.inf)
        highest, total, kept, weights = m.weigh(highest, total, logits)
        if shape.has_scales:
            scales = _scales(shape, s, stage, 1)
            weights = jnp.where(weights > 0, weights * scales, jnp.zeros_like(weights)) if is_edge else weights * scales
        weights = weights.astype(jnp.bfloat16)
        turn()
        done = []
        for p, part in enumerate(parts):
            values = keys_values.at[:, pl.ds(H + p * form.part, form.part)]
            done.append(ops.accumulate(part * m.columns(kept, part.shape), weights, values))
        ops.end_reading(is_by_threads=shape.is_converted)
        plgpu.barrier_arrive(s["stage_free"].at[stage])
        return n + 1, (highest, total, tuple(done))

    # once for all stages: loading it at edges takes registers that results are in
    last = ops.load(inputs[-1].at[item[Field.TILE], consumer], PER_LANE) if shape.has_spans else None
    state = _empty(shape, inputs, head, consumer)
    first, end = item[Field.FIRST_KV], item[Field.END_KV]
    first_full = jnp.clip(item[Field.FIRST_FULL], first, end)
    end_full = jnp.clip(item[Field.END_FULL], first_full, end)
    carry = (n, state)
    if shape.window is not None:
        carry = lax.fori_loop(first, first_full, lambda j, c: one_stage(j, c, True), carry)
    if shape.alternates:
        pl.when(consumer == 1)(functools.partial(_take_turn, s))
    carry = lax.fori_loop(first_full, end_full, lambda j, c: one_stage(j, c, False), carry)
    if shape.alternates:
        pl.when(consumer == 0)(functools.partial(_take_turn, s))
    n, state = lax.fori_loop(end_full, end, lambda j, c: one_stage(j, c, True), carry)
    if form.split is None:
        _store_whole(shape, outputs, s, consumer, slot, head, item, state)
    else:
        ops.end_reading(is_by_threads=False)
        plgpu.barrier_arrive(s["queries_free"].at[slot])
        _store_partial(shape, outputs, s, head, item, state)
    return n


def _scales(shape: Shape, s: dict[str, Any], stage: jax.Array, kind: int) -> jax.Array:  # [64, T]
    """The scales of the stage's K or V, repeated in every lane."""
    scales = shape.ops.load_pieces(s["scales"].at[stage, :, kind], PER_TOKEN)
    return lax.broadcast_in_dim(scales, (LANES, shape.form.tile_kv), [1])


def _empty(shape: Shape, inputs: Any, head: jax.Array, consumer: jax.Array) -> m.State:
    """The state before the first stage; a sink is a weight without a value, which a split leaves to the merge."""
    form, ops = shape.form, shape.ops
    parts = tuple(ops.full((LANES, form.part), 0.0, MATRIX) for _ in range(shape.head_dim // form.part))
    if form.split is not None:
        return ops.full((LANES,), m.LOWEST, PER_LANE), ops.full((LANES,), 0.0, PER_LANE), parts
    highest = ops.load(inputs[4].at[head, consumer], PER_LANE)
    return highest, jnp.where(highest > m.LOWEST, jnp.ones_like(highest), jnp.zeros_like(highest)), parts


def _visible(
    shape: Shape, consumer: jax.Array, item: dict[Field, jax.Array], begin: jax.Array, last: jax.Array | None
) -> jax.Array:
    """[64, T] bool: which tokens of the stage each query sees. last: the last of them, [64], where it has spans."""
    tile, ops = (LANES, shape.form.tile_kv), shape.ops
    position = ops.iota(tile, 1, MATRIX) + begin
    if not shape.causal:
        return position <= item[Field.HIGH]
    if last is not None and shape.window is None:  # the inference of layouts never ends over a query that nothing reads
        return position <= m.columns(last, tile)
    lane = ops.iota((LANES,), 0, PER_LANE) + consumer * LANES
    of_lane = item[Field.LOW] + lax.div(lane, shape.group)
    query = m.columns(of_lane, tile)
    visible = position <= (query if last is None else m.columns(last, tile))
    if shape.window is None:
        return visible
    if shape.chunked:
        return visible & (position > m.columns(of_lane - lax.rem(of_lane, shape.window) - 1, tile))
    return visible & (position > query - shape.window)


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
        _meet(shape, s)  # the last converted stage has been multiplied
        into = s["converted"]
    else:
        into = ref
    for kind in range(2):  # K by the first consumer, V by the last; with one consumer both are its
        if shape.is_converted or (kind == 1 and is_edge):
            clear = kind == 1 and is_edge
            is_mine = consumer == kind * (shape.form.consumers - 1)
            pl.when(is_mine)(functools.partial(_rewrite, shape, ref, into, kind, begin, item if clear else None))
    if shape.is_converted or is_edge:
        _meet(shape, s)
    return into


def _nothing() -> None:
    """What happens between two products where consumers do not alternate."""


def _take_turn(s: dict[str, Any]) -> None:
    """Waits until the other consumer is half a stage away.

    The second begins with one more and the first ends with one, so that scores of one are multiplied before values of
    the other, and each weighs while the other multiplies. At edges they meet instead.

        first     s - w - v s - w - v s -
        second    - s - w - v s - w - v s     - is a turn
    """
    plgpu.barrier_arrive(s["turn"])
    plgpu.barrier_wait(s["turn"])


def _meet(shape: Shape, s: dict[str, Any]) -> None:
    """Waits until every consumer is here."""
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
        if shape.dtype.itemsize == 1 and not shape.has_scales:  # the chip converts float8 to float16 only
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
    """Stores an item's results, through the shared memory that held its queries."""
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
    """Stores a split's results, only for lanes that belong to a head."""
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
