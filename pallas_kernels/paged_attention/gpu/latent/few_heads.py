"""Up to 32 heads of a row: tokens are the rows of a wgmma and heads its columns, so that few heads cost little.

One warpgroup computes, as many sums as it has registers for: [V, heads] of weighted values. A stage is 64 tokens; the
logits of a head are a column, whose highest is found across warps, and weights go to shared memory turned, as the
second product reads them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.latent.latent_shape import LatentShape
from pallas_kernels.paged_attention.gpu.ops import MATRIX, PER_TOKEN
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import Refs, Task, swizzled, unknown_zero

REDUCTION_BYTES = 2048  # the compiler's own, to find the highest of a column


def scratch_of(shape: LatentShape) -> dict[str, Any]:
    """Shared memory and barriers by name."""
    form, T = shape.form, shape.form.tile_kv
    matrix = functools.partial(swizzled, dtype=jnp.bfloat16, lanes=min(T, shape.rope_dim))
    return {
        "queries": matrix((form.query_slots, form.loaded, shape.key_dim)),
        "latents": matrix((form.stages, T, shape.key_dim)),
        "weights": matrix((form.loaded, T)),
        "sums": plgpu.SMEM((form.loaded,), jnp.float32),
        "queries_ready": plgpu.Barrier(num_barriers=form.query_slots),
        "queries_free": plgpu.Barrier(num_barriers=form.query_slots),
        "ready": plgpu.Barrier(num_arrivals=T // shape.rows, num_barriers=form.stages),
        "free": plgpu.Barrier(num_barriers=form.stages),
    }


def results_of(shape: LatentShape, splits: int, rows: int) -> tuple[Any, Any]:
    """Shapes of the results of splits and of their sums."""
    lanes = (splits, rows, shape.groups, shape.form.loaded)
    return jax.ShapeDtypeStruct((*lanes, shape.value_dim), jnp.float32), jax.ShapeDtypeStruct(lanes, jnp.float32)


def fetch(shape: LatentShape, refs: Refs, task: Task, n: Any) -> jax.Array:
    """Starts the transfers of an item. n: stages before it; returned with the item's own added."""
    form, s, (i, group, item) = shape.form, refs.scratch, task
    *_, tables, tokens, queries, latents = refs.inputs
    slot = lax.rem(i, form.query_slots)
    pl.when(i >= form.query_slots)(functools.partial(plgpu.barrier_wait, s["queries_free"].at[slot]))
    query = queries.at[tokens[item[Field.ROW]], group]
    plgpu.copy_gmem_to_smem(query, s["queries"].at[slot], s["queries_ready"].at[slot])

    def one_stage(tile: jax.Array, n: jax.Array) -> jax.Array:
        stage = shape.stage_of(n)
        sources = [shape.source(latents, tables, item, tile * form.tile_kv + first) for first in shape.pieces]
        pl.when(n >= form.stages)(functools.partial(plgpu.barrier_wait, s["free"].at[stage]))
        for first, source in zip(shape.pieces, sources, strict=True):
            there = s["latents"].at[stage, pl.ds(first, shape.rows)]
            plgpu.copy_gmem_to_smem(source, there, s["ready"].at[stage])
        return n + 1

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, n)


def slots_of(shape: LatentShape, num_items: Any, n: Any) -> list[tuple[Any, str, int]]:
    """Barriers that say what has been read: after how many uses, their name and number, in the order of uses."""
    return [(num_items, "queries_free", shape.form.query_slots), (n, "free", shape.form.stages)]


def consume(shape: LatentShape, refs: Refs, w: int, task: Task, n: jax.Array) -> jax.Array:
    """Computes an item. w: 0. n: stages before it; returned with the item's own added."""
    (_, outputs, s), (i, group, item) = refs, task
    form, ops, V = shape.form, shape.ops, shape.value_dim
    tile = (form.tile_kv, form.loaded)
    slot = lax.rem(i, form.query_slots)
    plgpu.barrier_wait(s["queries_ready"].at[slot])

    def one_stage(j: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, (highest, total, acc) = carry
        stage, begin = shape.stage_of(n), j * form.tile_kv
        latents = s["latents"].at[stage]
        plgpu.barrier_wait(s["ready"].at[stage])
        queries = s["queries"].at[slot + unknown_zero(n)]
        logits = m.logits(ops.scores(latents, queries), shape.scale, shape.soft_cap)
        if is_edge:
            logits = jnp.where(shape.is_seen(item, begin, tile, 0, MATRIX), logits, -jnp.inf)
        raised = jnp.maximum(highest, logits.max(axis=0))
        kept, weights = jnp.exp2(highest - raised), jnp.exp2(logits - _rows(raised, tile))
        ops.store_turned(s["weights"], weights.astype(jnp.bfloat16))
        if is_edge:
            shape.clear_unseen(latents, V, begin, item)
        plgpu.commit_smem()
        acc = ops.accumulate_turned(acc * _rows(kept, acc.shape), latents.at[:, pl.ds(0, V)], s["weights"])
        ops.end_reading(is_by_threads=is_edge)
        plgpu.barrier_arrive(s["free"].at[stage])
        return n + 1, (raised, total * _rows(kept, tile) + weights, acc)

    state = (
        ops.full((form.loaded,), m.LOWEST, PER_TOKEN),
        ops.full(tile, 0.0, MATRIX),  # summed over tokens at the end
        ops.full((V, form.loaded), 0.0, MATRIX),
    )
    n, (highest, total, acc) = shape.over_stages(item, one_stage, (n, state))
    ops.end_reading(is_by_threads=False)
    plgpu.barrier_arrive(s["queries_free"].at[slot])
    (results, sums), at = outputs, (item[Field.SPLIT], item[Field.TILE], group)
    total = total.sum(axis=0)
    ops.store_turned(results.at[at], acc * _rows(1.0 / total, acc.shape))
    s["sums"][...] = highest + jnp.log(total) * m.LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s["sums"], sums.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    return n


def _rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[heads], one value per head, in every row."""
    return lax.broadcast_in_dim(x, shape, [1])
