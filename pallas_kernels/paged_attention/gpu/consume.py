"""The warpgroups of the GPU's attention kernel that compute: scores, softmax weights and values of each stage."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.config import LANES, Divided
from pallas_kernels.paged_attention.gpu.ops import MATRIX, PER_LANE, PER_TOKEN, SMALL
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import ConsumerPart, Refs, Shape, StageTile, Task, unknown_zero


def consume(shape: Shape, refs: Refs, me: ConsumerPart, task: Task, n: jax.Array) -> jax.Array:
    """Computes an item. n: stages before it; returned with the item's own added."""
    (inputs, outputs, s), (i, head, item) = refs, task
    form, ops, H = shape.form, shape.ops, shape.head_dim
    slot = lax.rem(i, form.query_slots)
    plgpu.barrier_wait(s["queries_ready"].at[slot])

    def one_stage(tile: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, (highest, total, parts) = carry
        stage = shape.stage_of(n, me.ring)
        at = StageTile(n, stage, tile * form.tile_kv, slot, item if is_edge else None)
        readable = _keys if shape.is_apart else _keys_and_values
        keys_values = readable(shape, s, me, at)
        turn = _nothing if is_edge or not shape.alternates else functools.partial(_take_turn, s)
        queries = s["queries"].at[slot + unknown_zero(n) if shape.is_apart else slot, me.group]
        scores = ops.scores(queries if held is None else held, keys_values.at[:, pl.ds(0, H)], turn)
        if shape.has_scales:
            scores *= _scales(shape, s, stage, 0)
        if shape.is_apart:
            _end_keys(shape, s, stage)
        factor = shape.scale * m.LOG2_E if shape.soft_cap is None else 1.0
        if shape.soft_cap is not None:
            scores = m.logits(scores, shape.scale, shape.soft_cap)
        if is_edge:
            scores = jnp.where(_visible(shape, me, item, at.begin, last), scores, -jnp.inf)
        highest, total, kept, weights = m.weigh(highest, total, scores, factor)
        if shape.is_apart:
            keys_values = _own_values(shape, s, me, at)
        if shape.has_scales:
            scales = _scales(shape, s, stage, 1)
            weights = jnp.where(weights > 0, weights * scales, jnp.zeros_like(weights)) if is_edge else weights * scales
        weights = weights.astype(jnp.bfloat16)
        turn()
        done = []
        for p, part in enumerate(parts):
            values = keys_values.at[:, pl.ds(shape.first_value + me.column + p * form.part, form.part)]
            done.append(ops.accumulate(part * m.columns(kept, part.shape), weights, values))
        _free(shape, s, stage, form.halves - 1)
        return n + 1, (highest, total, tuple(done))

    held = ops.load(s["queries"].at[slot, me.group], MATRIX) if form.divided is Divided.TILES else None
    # once for all stages: loading it at edges takes registers that results are in
    last = ops.load(inputs[-1].at[item[Field.TILE], me.group], PER_LANE) if shape.has_spans else None
    n, state = _over_stages(shape, s, me, item, one_stage, (n, _empty(shape, inputs, head, me)))
    if form.split is None:
        _store_whole(shape, outputs, s, me, slot, head, item, state)
    else:
        if shape.writes:
            is_last = item[Field.HIGH] < item[Field.END_KV] * form.tile_kv
            pl.when(is_last)(functools.partial(_store_new, shape, inputs, s["new"].at[slot], head, item))
        ops.end_reading(is_by_threads=held is not None or shape.writes)
        plgpu.barrier_arrive(s["queries_free"].at[slot])
        _store_partial(shape, outputs, s, me, head, item, state)
    return n


def _over_stages(
    shape: Shape,
    s: dict[str, Any],
    me: ConsumerPart,
    item: dict[Field, jax.Array],
    one_stage: Callable[..., Any],
    carry: Any,
) -> Any:
    """Runs `one_stage(tile, carry, is_edge)` over an item's tiles; at an edge some tokens are not seen."""

    def own(begin: jax.Array, end: jax.Array, is_edge: bool, carry: Any) -> Any:
        rings = shape.form.rings
        if rings == 1:
            return lax.fori_loop(begin, end, lambda j, c: one_stage(j, c, is_edge), carry)
        begin += lax.rem(begin + me.ring, rings)  # its first tile
        count = lax.div(jnp.maximum(end - begin, 0) + rings - 1, rings)
        return lax.fori_loop(0, count, lambda i, c: one_stage(begin + rings * i, c, is_edge), carry)

    first, end = item[Field.FIRST_KV], item[Field.END_KV]
    first_full = jnp.clip(item[Field.FIRST_FULL], first, end)
    end_full = item[Field.END_FULL]
    if shape.writes:  # the tile with the token that is new
        end_full = jnp.minimum(end_full, lax.div(item[Field.HIGH], shape.form.tile_kv))
    end_full = jnp.clip(end_full, first_full, end)
    if shape.window is not None:
        carry = own(first, first_full, True, carry)
    if shape.alternates:
        pl.when(me.number == 1)(functools.partial(_take_turn, s))
    carry = own(first_full, end_full, False, carry)
    if shape.alternates:
        pl.when(me.number == 0)(functools.partial(_take_turn, s))
    return own(end_full, end, True, carry)


def _scales(shape: Shape, s: dict[str, Any], stage: jax.Array, kind: int) -> jax.Array:  # [64, T]
    """The scales of the stage's K or V, repeated in every lane."""
    place = stage * shape.form.halves + kind * (shape.form.halves - 1)
    scales = shape.ops.load_pieces(s["scales"].at[place, :, kind], PER_TOKEN)
    return lax.broadcast_in_dim(scales, (LANES, shape.form.tile_kv), [1])


def _empty(shape: Shape, inputs: Any, head: jax.Array, me: ConsumerPart) -> m.State:
    """The state before the first stage; a sink is a weight without a value, which a split leaves to the merge."""
    form, ops = shape.form, shape.ops
    parts = tuple(ops.full((LANES, form.part), 0.0, MATRIX) for _ in range(shape.summed // form.part))
    if form.split is not None:
        return ops.full((LANES,), m.LOWEST, PER_LANE), ops.full((LANES,), 0.0, PER_LANE), parts
    highest = ops.load(inputs[4].at[head, me.group], PER_LANE)
    return highest, jnp.where(highest > m.LOWEST, jnp.ones_like(highest), jnp.zeros_like(highest)), parts


def _visible(
    shape: Shape, me: ConsumerPart, item: dict[Field, jax.Array], begin: jax.Array, last: jax.Array | None
) -> jax.Array:
    """[64, T] bool: which tokens of the stage each query sees. last: the last of them, [64], where it has spans."""
    tile, ops = (LANES, shape.form.tile_kv), shape.ops
    position = ops.iota(tile, 1, MATRIX) + begin
    if not shape.causal:
        return position <= item[Field.HIGH]
    if last is not None and shape.window is None:  # the inference of layouts never ends over a query that nothing reads
        return position <= m.columns(last, tile)
    lane = ops.iota((LANES,), 0, PER_LANE) + me.group * LANES
    of_lane = item[Field.LOW] + lax.div(lane, shape.group)
    query = m.columns(of_lane, tile)
    visible = position <= (query if last is None else m.columns(last, tile))
    if shape.window is None:
        return visible
    if shape.chunked:
        return visible & (position > m.columns(of_lane - lax.rem(of_lane, shape.window) - 1, tile))
    return visible & (position > query - shape.window)


def _keys_and_values(shape: Shape, s: dict[str, Any], me: ConsumerPart, at: StageTile) -> Any:  # a ref [T, H + V]
    """The stage's K and V as wgmma reads them; at an edge, the values that no query sees are zero."""
    _wait(shape, s, at.stage, 0)
    ref, (H, V) = s["stages"].at[at.stage], (shape.head_dim, shape.value_dim)
    if shape.is_converted:
        _meet(shape, s)  # the last converted stage has been multiplied
    into = s["converted"].at[me.ring + unknown_zero(at.n)] if shape.is_converted else ref
    for kind, columns in enumerate((range(H), range(H, H + V))):  # K by the first consumer, V by the last
        if shape.is_converted or (at.item is not None and (kind == 1 or shape.writes)):
            seen_by = at if kind == 1 or shape.writes else at._replace(item=None)
            new = s["new"].at[at.slot, kind] if shape.writes else None
            rewrite = functools.partial(_rewrite, shape, ref, into, columns, seen_by, new)
            if "together" in s:
                pl.when(me.number == kind * (shape.form.consumers - 1))(rewrite)
            else:
                rewrite()
    if shape.is_converted or at.item is not None:
        _meet(shape, s)
    return into


def _keys(shape: Shape, s: dict[str, Any], me: ConsumerPart, at: StageTile) -> Any:  # a ref whose first columns are K
    """The stage's K as wgmma reads it, where V comes apart; each consumer converts as many columns as it has of V."""
    _wait(shape, s, at.stage, 0)
    ref = s["stages"].at[at.stage * shape.form.halves]
    if not shape.is_converted:
        return ref
    _rewrite(
        shape, ref, s["converted"].at[me.ring + unknown_zero(at.n)], _own(shape, me), at._replace(item=None)
    )  # where it alone read values
    _meet(shape, s)
    return s["converted"].at[me.ring + unknown_zero(at.n)]


def _end_keys(shape: Shape, s: dict[str, Any], stage: jax.Array) -> None:
    """Says that K has been multiplied."""
    _free(shape, s, stage, 0)
    if shape.is_converted:
        _meet(shape, s)  # values take its place


def _own_values(
    shape: Shape, s: dict[str, Any], me: ConsumerPart, at: StageTile
) -> Any:  # a ref, V from first_value on
    """The consumer's own columns of V as wgmma reads them, where they come after K."""
    _wait(shape, s, at.stage, 1)
    ref = s["stages"].at[at.stage * shape.form.halves + 1]
    into = s["converted"].at[me.ring + unknown_zero(at.n)] if shape.is_converted else ref
    if shape.is_converted or at.item is not None:
        _rewrite(shape, ref, into, _own(shape, me), at)
    return into


def _own(shape: Shape, me: ConsumerPart) -> range:
    """The consumer's columns of a half."""
    return range(me.column, me.column + shape.summed)


def _wait(shape: Shape, s: dict[str, Any], stage: jax.Array, half: int) -> None:
    """Waits until that half of a stage, or all of it, is there."""
    plgpu.barrier_wait(s["stage_ready"].at[stage * shape.form.halves + half])


def _free(shape: Shape, s: dict[str, Any], stage: jax.Array, half: int) -> None:
    """Says that this consumer has read that half of a stage, or all of it."""
    shape.ops.end_reading(is_by_threads=shape.is_converted)
    plgpu.barrier_arrive(s["stage_free"].at[stage * shape.form.halves + half])


def _nothing() -> None:
    """Runs between two products where consumers do not alternate."""


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
    """Waits until every consumer of the same stages is here."""
    if "together" in s:
        plgpu.barrier_arrive(s["together"])
        plgpu.barrier_wait(s["together"])


def _rewrite(shape: Shape, ref: Any, into: Any, columns: range, at: StageTile, new: Any = None) -> None:
    """A stage's columns, in bfloat16; at an edge, tokens that none of its queries sees are zero.

    new: a ref with these columns of the item's last token, which the pool does not have yet.
    """
    ops, width, item = shape.ops, shape.width, at.item
    layout = SMALL if shape.is_converted else MATRIX
    for first in columns[::width]:
        values = ops.load(ref.at[:, pl.ds(first, width)], layout)
        if shape.dtype.itemsize == 1 and not shape.has_scales:  # the chip converts float8 to float16 only
            values = values.astype(jnp.float16).astype(jnp.float32)
        values = values.astype(jnp.bfloat16)
        if item is not None:
            position = ops.iota(values.shape, 0, layout) + at.begin
            is_seen = (position >= item[Field.OLDEST]) & (position <= item[Field.HIGH])
            values = jnp.where(is_seen, values, jnp.zeros_like(values))
            if new is not None:
                of_token = ops.load(new.at[pl.ds(first - columns.start, width)], PER_TOKEN)
                of_token = lax.broadcast_in_dim(of_token, values.shape, [1])
                values = jnp.where(position == item[Field.HIGH], of_token, values)
        into[:, pl.ds(first, width)] = values
    plgpu.commit_smem()


def _store_whole(
    shape: Shape,
    outputs: Any,
    s: dict[str, Any],
    me: ConsumerPart,
    slot: jax.Array,
    head: jax.Array,
    item: dict[Field, jax.Array],
    state: m.State,
) -> None:
    """Stores an item's results, through the shared memory that held its queries."""
    form, (_, total, parts) = shape.form, state
    there = s["queries"].at[slot, me.group]
    is_shared = form.lane_groups < form.consumers
    if is_shared:
        _meet(shape, s)  # the other has multiplied these queries too
    inverse = 1.0 / jnp.where(total > 0, total, jnp.ones_like(total))
    for p, part in enumerate(parts):
        columns = pl.ds(me.column + p * form.part, form.part)
        there[:, columns] = (part * m.columns(inverse, part.shape)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    if is_shared:
        _meet(shape, s)
    if not is_shared or me.number == 0:
        plgpu.copy_smem_to_gmem(there, outputs[0].at[item[Field.TILE], head, me.group])
        plgpu.wait_smem_to_gmem(0)
    plgpu.barrier_arrive(s["queries_free"].at[slot])


def _store_new(shape: Shape, inputs: Any, new: Any, head: jax.Array, item: dict[Field, jax.Array]) -> None:
    """Writes K and V of an item's last token to its block, whose place no other item reads."""
    (_, _, tables, _, _, values, *_), H, high = inputs, shape.head_dim, item[Field.HIGH]
    at = shape.place_of(tables, item[Field.ROW], high), high & (shape.rows - 1), head
    for kind in range(2):
        plgpu.copy_smem_to_gmem(new.at[kind], values.at[(*at, pl.ds(kind * H, H))])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_partial(
    shape: Shape,
    outputs: Any,
    s: dict[str, Any],
    me: ConsumerPart,
    head: jax.Array,
    item: dict[Field, jax.Array],
    state: m.State,
) -> None:
    """Stores a split's results, only for lanes that belong to a head."""
    form, (highest, total, parts) = shape.form, state
    (results, sums), own_sums = outputs, s["sums"].at[me.ring]
    at = (item[Field.SPLIT] * form.rings + me.ring, item[Field.TILE], head)
    inverse = 1.0 / (total if form.rings == 1 else jnp.where(total > 0, total, jnp.ones_like(total)))  # of no tile
    lanes, there = pl.ds(0, form.loaded), s["result"].at[me.number]
    stores_sums = form.divided is not Divided.VALUES or me.number == 0
    if stores_sums:
        own_sums[...] = highest + jnp.log(total) * m.LOG2_E
    for p, part in enumerate(parts):
        there[...] = part * m.columns(inverse, part.shape)
        plgpu.commit_smem()
        columns = pl.ds(me.column + p * form.part, form.part)
        plgpu.copy_smem_to_gmem(there.at[lanes], results.at[(*at, slice(None), columns)])
        if p == 0 and stores_sums:
            plgpu.copy_smem_to_gmem(own_sums.at[lanes], sums.at[at])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
