"""Up to 64 heads of a row as the rows of a wgmma.

The sums of 64 heads are more than one warpgroup's registers hold, so each of two has half of a latent's values. A stage
is two shares of tokens; each warpgroup scores one of them, and the other takes its weights from shared memory:

    0      s w v      v   s w v      v       scores, weights and values of share 0, then values of share 1
    1          v  s w v       v  s w v       values of share 0, then scores, weights and values of share 1

A share's memory is fetched into again while the other share is computed, and there is no more of it.
"""

import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.latent.latent_shape import HALVES, LatentShape
from pallas_kernels.paged_attention.gpu.ops import MATRIX, PER_LANE
from pallas_kernels.paged_attention.gpu.schedule import Field
from pallas_kernels.paged_attention.gpu.shape import Refs, Task, swizzled, unknown_zero

REDUCTION_BYTES = 128  # the compiler's own, the least that it takes: no reduction crosses warps


class PerLane(enum.IntEnum):
    """Values of each lane that a warpgroup keeps in one shared buffer, because each buffer is padded to 1 KiB."""

    HIGHEST = 0  # logit up to its share of a stage; at a split's end, the base-2 logarithm of all weights
    TOTAL = 1  # of its shares' weights


class _Share(NamedTuple):
    """n: stages before it. begin: position of its first token. item: None where all tokens are seen."""

    n: jax.Array
    begin: jax.Array
    item: dict[Field, jax.Array] | None


def scratch_of(shape: LatentShape) -> dict[str, Any]:
    """Shared memory and barriers by name.

    A share of a stage comes in two parts, because two warpgroups read them last: the half of its values that the one
    sums which scores the share too, and the rest.
    """
    form, share, half, rope = shape.form, shape.share, shape.half, shape.rope_dim
    matrix = functools.partial(swizzled, dtype=jnp.bfloat16, lanes=min(share, rope))
    shares, pieces = (form.stages, HALVES), share // shape.rows
    slots = form.stages * HALVES
    scratch = {
        "queries": matrix((form.query_slots, HALVES, LANES, half)),
        "rope_queries": matrix((form.query_slots, LANES, rope)),
        "values": matrix((*shares, HALVES, share, half)),
        "ropes": matrix((*shares, share, rope)),
        "lanes": plgpu.SMEM((len(PerLane), HALVES, LANES), jnp.float32),
        "queries_ready": plgpu.Barrier(num_arrivals=HALVES + 1),
        "queries_free": plgpu.Barrier(num_arrivals=HALVES, num_barriers=form.query_slots),
        "own_ready": plgpu.Barrier(num_arrivals=pieces, num_barriers=slots),
        "own_free": plgpu.Barrier(num_barriers=slots),
        "rest_ready": plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=slots),
        "rest_free": plgpu.Barrier(num_barriers=slots),
        "weighed": plgpu.Barrier(num_barriers=HALVES),  # shares
        "together": plgpu.Barrier(num_arrivals=HALVES),
    }
    if not shape.weighs_in_ropes:
        scratch["weights"] = matrix((HALVES, LANES, share))
    return scratch


def results_of(shape: LatentShape, splits: int, rows: int) -> tuple[Any, Any]:
    """Shapes of the results of splits and of their sums, these equal for both halves of the values."""
    lanes = (splits, rows, shape.groups, HALVES, LANES)
    return jax.ShapeDtypeStruct((*lanes, shape.half), jnp.float32), jax.ShapeDtypeStruct(lanes, jnp.float32)


def fetch(shape: LatentShape, refs: Refs, task: Task, n: Any) -> jax.Array:
    """Starts the transfers of an item. n: stages before it; returned with the item's own added."""
    form, s, (i, group, item) = shape.form, refs.scratch, task
    _, _, tables, tokens, queries, latents = refs.inputs
    pl.when(i > 0)(functools.partial(plgpu.barrier_wait, s["queries_free"].at[0]))
    lanes, query = pl.ds(0, form.loaded), queries.at[tokens[item[Field.ROW]], group]
    for half in range(HALVES):
        there = s["queries"].at[0, half, lanes]
        plgpu.copy_gmem_to_smem(query.at[:, shape.columns(half)], there, s["queries_ready"])
    plgpu.copy_gmem_to_smem(query.at[:, shape.rope_columns], s["rope_queries"].at[0, lanes], s["queries_ready"])

    def one_stage(tile: jax.Array, n: jax.Array) -> jax.Array:
        stage, firsts = shape.stage_of(n), range(0, shape.share, shape.rows)
        found = [shape.source(latents, tables, item, tile * form.tile_kv + first) for first in shape.pieces]
        for share in range(HALVES):
            slot, sources = stage * HALVES + share, found[share * len(firsts) : (share + 1) * len(firsts)]
            for half, part in ((share, "own"), (1 - share, "rest")):
                ready, free = s[f"{part}_ready"].at[slot], s[f"{part}_free"].at[slot]
                pl.when(n >= form.stages)(functools.partial(plgpu.barrier_wait, free))
                for first, source in zip(firsts, sources, strict=True):
                    there = pl.ds(first, shape.rows)
                    values = s["values"].at[stage, share, half, there]
                    plgpu.copy_gmem_to_smem(source.at[:, shape.columns(half)], values, ready)
                    if part == "rest":
                        ropes = s["ropes"].at[stage, share, there]
                        plgpu.copy_gmem_to_smem(source.at[:, shape.rope_columns], ropes, ready)
        return n + 1

    return lax.fori_loop(item[Field.FIRST_KV], item[Field.END_KV], one_stage, n)


def slots_of(shape: LatentShape, num_items: Any, n: Any) -> list[tuple[Any, str, int]]:
    """Barriers that say what has been read: after how many uses, their name and number, in the order of uses."""
    return [
        (num_items, "queries_free", 1),
        *((n * HALVES, name, shape.form.stages * HALVES) for name in ("own_free", "rest_free")),
    ]


def consume(shape: LatentShape, refs: Refs, w: int, task: Task, n: jax.Array) -> jax.Array:
    """Computes an item. n: stages before it; returned with the item's own added."""
    (_, outputs, s), (_, group, item) = refs, task
    plgpu.barrier_wait(s["queries_ready"])

    def one_stage(tile: jax.Array, carry: Any, is_edge: bool) -> Any:
        n, state = carry
        for share in range(HALVES):
            begin = tile * shape.form.tile_kv + share * shape.share
            sum_up = _score_and_sum if share == w else _sum_values
            state = sum_up(shape, s, w, _Share(n, begin, item if is_edge else None), state)
        return n + 1, state

    ops = shape.ops
    state = (
        ops.full((LANES,), m.LOWEST, PER_LANE),
        ops.full((LANES,), 0.0, PER_LANE),
        ops.full((LANES, shape.half), 0.0, MATRIX),
    )
    n, state = shape.over_stages(item, one_stage, (n, state))
    ops.end_reading(is_by_threads=False)
    plgpu.barrier_arrive(s["queries_free"].at[0])
    _store(shape, outputs, s, w, (item[Field.SPLIT], item[Field.TILE], group, w), state)
    return n


def _score_and_sum(shape: LatentShape, s: dict[str, Any], w: int, of: _Share, state: Any) -> Any:
    """The state with a share that this warpgroup scores."""
    (highest, total, acc), (n, begin, item) = state, of
    ops, stage = shape.ops, shape.stage_of(n)
    logits = m.logits(_scores(shape, s, stage, w, unknown_zero(n)), shape.scale, shape.soft_cap)
    if item is not None:
        logits = jnp.where(shape.is_seen(item, begin, logits.shape, 1, MATRIX), logits, -jnp.inf)
    highest, total, kept, weights = m.weigh(highest, total, logits)
    mine = w + unknown_zero(n)
    weights, values = weights.astype(jnp.bfloat16), s["values"].at[stage, mine, mine]
    s["lanes"].at[PerLane.HIGHEST, w][...] = highest
    _weights(shape, s, stage, w)[...] = weights
    if item is not None:
        shape.clear_unseen(values, shape.half, begin, item)
    plgpu.commit_smem()
    plgpu.barrier_arrive(s["weighed"].at[w])
    acc = ops.accumulate(acc * m.columns(kept, acc.shape), weights, values)
    ops.end_reading(is_by_threads=item is not None)
    plgpu.barrier_arrive(s["own_free"].at[stage * HALVES + w])
    return highest, total, acc


def _sum_values(shape: LatentShape, s: dict[str, Any], w: int, of: _Share, state: Any) -> Any:
    """The state with a share that the other warpgroup scores."""
    (highest, total, acc), (n, begin, item) = state, of
    ops, stage = shape.ops, shape.stage_of(n)
    mine = w + unknown_zero(n)
    slot, values = stage * HALVES + 1 - w, s["values"].at[stage, 1 - mine, mine]
    plgpu.barrier_wait(s["rest_ready"].at[slot])
    plgpu.barrier_wait(s["weighed"].at[1 - w])
    raised = ops.load(s["lanes"].at[PerLane.HIGHEST, 1 - w], PER_LANE)
    kept = jnp.exp2(highest - raised)
    if item is not None:
        shape.clear_unseen(values, shape.half, begin, item)
        plgpu.commit_smem()
    acc = ops.accumulate(acc * m.columns(kept, acc.shape), _weights(shape, s, stage, 1 - mine), values)
    ops.end_reading(is_by_threads=item is not None)
    plgpu.barrier_arrive(s["rest_free"].at[slot])
    return raised, total * kept, acc


def _scores(
    shape: LatentShape, s: dict[str, Any], stage: jax.Array, w: int, slot: jax.Array
) -> jax.Array:  # [64, share]
    """Every head's query times the keys of this warpgroup's share, in the order in which its parts arrive."""
    queries, values, ready = s["queries"].at[slot], s["values"].at[stage, w], stage * HALVES + w
    plgpu.barrier_wait(s["own_ready"].at[ready])
    return shape.ops.scores_of_parts(
        *((queries.at[half], values.at[half]) for half in (w, 1 - w)),
        (s["rope_queries"].at[slot], s["ropes"].at[stage, w]),
        after_first=lambda: plgpu.barrier_wait(s["rest_ready"].at[ready]),
    )


def _weights(
    shape: LatentShape, s: dict[str, Any], stage: jax.Array, share: int | jax.Array
) -> Any:  # a ref [64, share]
    return s["ropes"].at[stage, share] if shape.weighs_in_ropes else s["weights"].at[share]


def _meet(s: dict[str, Any]) -> None:
    """Waits until both warpgroups are here."""
    plgpu.barrier_arrive(s["together"])
    plgpu.barrier_wait(s["together"])


def _store(shape: LatentShape, outputs: Any, s: dict[str, Any], w: int, at: Any, state: Any) -> None:
    """Stores the split's results: this warpgroup's half, and the sum of all weights."""
    (highest, total, acc), (results, sums) = state, outputs
    s["lanes"].at[PerLane.TOTAL, w][...] = total
    plgpu.commit_smem()
    _meet(s)
    total += shape.ops.load(s["lanes"].at[PerLane.TOTAL, 1 - w], PER_LANE)
    results[at] = acc * m.columns(1.0 / total, acc.shape)
    s["lanes"].at[PerLane.HIGHEST, w][...] = highest + jnp.log(total) * m.LOG2_E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s["lanes"].at[PerLane.HIGHEST, w], sums.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
