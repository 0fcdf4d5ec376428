"""The warpgroups of the latents' kernel that compute; `w` is this one and `1 - w` the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent.shape import HALVES, LatentShape, PerLane, unknown_zero
from pallas_kernels.paged_attention.gpu.ops import FEW_ROWS, MATRIX, PER_LANE
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import Refs, Task

_CLEARED = 64  # values of a token at once


def consume(shape: LatentShape, refs: Refs, w: jax.Array, task: Task, n: jax.Array) -> jax.Array:
    """Computes an item. n: stages before it; returned with the item's own added."""
    (_, outputs, s), (_, group, item) = refs, task
    form, ops = shape.form, shape.ops
    plgpu.barrier_wait(s["queries_ready"])

    def one_stage(tile: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, (highest, total, acc) = carry
        stage = shape.stage_of(n)
        mine, others = stage * HALVES + w, stage * HALVES + 1 - w
        logits = m.logits(_scores(shape, s, stage, w, unknown_zero(n)), shape.scale, shape.soft_cap)
        if is_edge:
            begin = tile * form.tile_kv + w * shape.share
            logits = jnp.where(_is_seen(shape, item, begin, logits.shape, 1, MATRIX), logits, -jnp.inf)
        own = logits.max(axis=1)
        s["lanes"].at[PerLane.HIGHEST, w][...] = own
        _meet(s)
        raised = jnp.maximum(highest, jnp.maximum(own, ops.load(s["lanes"].at[PerLane.HIGHEST, 1 - w], PER_LANE)))
        kept, weights = jnp.exp2(highest - raised), jnp.exp2(logits - m.columns(raised, logits.shape))
        total = total * kept + weights.sum(axis=1)
        weights = weights.astype(jnp.bfloat16)
        _weights(shape, s, stage, w)[...] = weights
        plgpu.barrier_wait(s["rest_ready"].at[others])
        if is_edge:
            _clear(shape, s, stage, w, tile, item)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s["together"])

        def release(slot: Any) -> None:
            ops.end_reading(is_by_threads=is_edge)
            plgpu.barrier_arrive(slot)

        values = s["values"].at[stage]
        acc = ops.accumulate_both(
            acc * m.columns(kept, acc.shape),
            (weights, values.at[w, w]),
            (_weights(shape, s, stage, 1 - w), values.at[1 - w, w]),
            meanwhile=lambda: plgpu.barrier_wait(s["together"]),
            after_first=lambda: release(s["own_free"].at[mine]),
        )
        release(s["rest_free"].at[others])
        return n + 1, (raised, total, acc)

    state = (
        ops.full((LANES,), m.LOWEST, PER_LANE),
        ops.full((LANES,), 0.0, PER_LANE),
        ops.full((LANES, shape.half), 0.0, MATRIX),
    )
    first, end = item[Field.FIRST_KV], item[Field.END_KV]
    first_full = jnp.clip(item[Field.FIRST_FULL], first, end)
    end_full = jnp.clip(item[Field.END_FULL], first_full, end)
    carry = (n, state)
    if shape.window is not None:
        carry = lax.fori_loop(first, first_full, lambda j, c: one_stage(j, c, True), carry)
    carry = lax.fori_loop(first_full, end_full, lambda j, c: one_stage(j, c, False), carry)
    n, state = lax.fori_loop(end_full, end, lambda j, c: one_stage(j, c, True), carry)
    ops.end_reading(is_by_threads=False)
    plgpu.barrier_arrive(s["queries_free"])
    _store(shape, outputs, s, w, (item[Field.SPLIT], item[Field.TILE], group, w), state)
    return n


def _scores(
    shape: LatentShape, s: dict[str, Any], stage: jax.Array, w: jax.Array, slot: jax.Array
) -> jax.Array:  # [64, share]
    """Every head's query times the keys of this warpgroup's tokens, in the order in which their parts arrive."""
    queries, values, ready = s["queries"].at[slot], s["values"].at[stage, w], stage * HALVES + w
    plgpu.barrier_wait(s["own_ready"].at[ready])
    return shape.ops.scores(
        *((queries.at[half], values.at[half]) for half in (w, 1 - w)),
        (s["rope_queries"].at[slot], s["ropes"].at[stage, w]),
        after_first=lambda: plgpu.barrier_wait(s["rest_ready"].at[ready]),
    )


def _weights(shape: LatentShape, s: dict[str, Any], stage: jax.Array, share: jax.Array) -> Any:  # a ref [64, share]
    return s["ropes"].at[stage, share] if shape.weighs_in_ropes else s["weights"].at[share]


def _is_seen(
    shape: LatentShape, item: dict[Field, jax.Array], begin: jax.Array, like: tuple[int, ...], axis: int, layout: Any
) -> jax.Array:
    """Which tokens, from position `begin` on along the axis, the row's query sees."""
    position = shape.ops.iota(like, axis, layout) + begin
    return (position >= item[Field.OLDEST]) & (position <= item[Field.HIGH])


def _clear(
    shape: LatentShape, s: dict[str, Any], stage: jax.Array, w: jax.Array, tile: jax.Array, item: dict[Field, jax.Array]
) -> None:
    """Makes values zero of tokens that are not seen, in this warpgroup's half of the stage: 0 x NaN is NaN."""
    for share in range(HALVES):
        ref, begin = s["values"].at[stage, share, w], tile * shape.form.tile_kv + share * shape.share
        for first in range(0, shape.half, _CLEARED):
            columns = pl.ds(first, _CLEARED)
            values = shape.ops.load(ref.at[:, columns], FEW_ROWS)
            is_seen = _is_seen(shape, item, begin, values.shape, 0, FEW_ROWS)
            ref[:, columns] = jnp.where(is_seen, values, jnp.zeros_like(values))


def _meet(s: dict[str, Any]) -> None:
    """Waits until both warpgroups are here."""
    plgpu.barrier_arrive(s["together"])
    plgpu.barrier_wait(s["together"])


def _store(shape: LatentShape, outputs: Any, s: dict[str, Any], w: jax.Array, at: Any, state: Any) -> None:
    """Stores the split's results: this warpgroup's half, and the sum of all weights."""
    (highest, total, acc), (results, sums) = state, outputs
    s["lanes"].at[PerLane.TOTAL, w][...] = total
    _meet(s)
    total += shape.ops.load(s["lanes"].at[PerLane.TOTAL, 1 - w], PER_LANE)
    results[at] = acc * m.columns(1.0 / total, acc.shape)
    s["lanes"].at[PerLane.HIGHEST, w][...] = highest + jnp.log(total) * m.LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s["lanes"].at[PerLane.HIGHEST, w], sums.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
