"""Merging the splits of decoding rows: one warpgroup for 64 lanes and a few lanes of the head dim.

Splits are read several at a time, for a row of 128k tokens has many and each read waits as long as the first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu import math as m
from pallas_kernels.paged_attention.gpu.config import LANES
from pallas_kernels.paged_attention.gpu.ops import MATRIX, PER_LANE, Ops

FEW = 4  # splits; `merge_few` reads all of them, whatever a row has
_AT_ONCE = 8
_PART = 16  # lanes of the head dim


def merge(
    results: jax.Array,  # [splits, lanes, H] float32, a multiple of 64 lanes
    sums: jax.Array,  # [splits, lanes] float32, the base-2 logarithm of each split's weights
    num_splits: jax.Array,  # [lanes] int32
    sinks: jax.Array,  # [lanes] float32, base 2; LOWEST where there are none
    *,
    ops: Ops,
    interpret: Any,
) -> jax.Array:  # [lanes, H] bfloat16, zero where a lane has no split
    """The weighted means of the splits of each lane, weighed by their sums; what is no split is not read into it."""
    splits, lanes, H = results.shape
    if splits == 1:  # its weights sum to 1, but for the sink's
        kept = 1.0 / (1.0 + jnp.exp2(sinks - sums[0]))
        return jnp.where((num_splits > 0)[:, None], results[0] * kept[:, None], 0.0).astype(jnp.bfloat16)
    groups, parts = lanes // LANES, H // _PART
    by_group = num_splits.reshape(groups, LANES)
    launch = plgpu.kernel(
        lambda *refs: _body(ops, splits, *refs),
        out_type=jax.ShapeDtypeStruct((groups, parts, LANES, _PART), jnp.float32),
        grid=(groups, parts),
        grid_names=("group", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out = launch(
        results.reshape(splits, groups, LANES, parts, _PART),
        sums.reshape(splits, groups, LANES),
        by_group,
        by_group.max(axis=1),
        sinks.reshape(groups, LANES),
    )
    return out.transpose(0, 2, 1, 3).reshape(lanes, H).astype(jnp.bfloat16)


def merge_few(
    results: jax.Array,  # [splits, rows, K, G, H] float32
    sums: jax.Array,  # [splits, rows, K, G] float32
    num_splits: jax.Array,  # [rows] int32
    sinks: jax.Array | None,  # [K, G] float32
) -> jax.Array:  # [rows, K, G, H] bfloat16
    """`merge` without loops and reductions, so that XLA makes one fusion of it and of what puts lanes in order."""
    are_there = [split < num_splits[:, None, None, None] for split in range(len(results))]
    logs = [jnp.where(is_there, own[..., None], m.LOWEST) for is_there, own in zip(are_there, sums, strict=True)]
    logs += [] if sinks is None else [sinks[None, ..., None]]
    highest = functools.reduce(jnp.maximum, logs)
    weights = [jnp.exp2(own - highest) for own in logs]
    found = zip(are_there, weights, results, strict=False)
    parts = [jnp.where(is_there, x * weight, 0.0) for is_there, weight, x in found]
    return (functools.reduce(jnp.add, parts) / functools.reduce(jnp.add, weights)).astype(jnp.bfloat16)


def _body(ops: Ops, splits: int, results: Any, sums: Any, num_splits: Any, most: Any, sinks: Any, out: Any) -> None:
    group, part = lax.axis_index("group"), lax.axis_index("part")
    mine = ops.load(num_splits.at[group], PER_LANE)

    def several(i: jax.Array, state: Any) -> Any:
        highest, total, acc = state
        found = []
        for j in range(min(_AT_ONCE, splits)):
            split = i * _AT_ONCE + j
            place = jnp.minimum(split, splits - 1)
            found.append(
                (
                    split < mine,
                    ops.load(sums.at[place, group], PER_LANE),
                    ops.load(results.at[place, group, :, part], MATRIX),
                )
            )
        found = [(is_one, jnp.where(is_one, lane_sums, -jnp.inf), values) for is_one, lane_sums, values in found]
        raised = highest
        for _, lane_sums, _ in found:
            raised = jnp.maximum(raised, lane_sums)
        kept = jnp.exp2(highest - raised)
        total, acc = total * kept, acc * m.columns(kept, acc.shape)
        for is_one, lane_sums, values in found:
            weight = jnp.exp2(lane_sums - raised)
            total += weight
            is_one = m.columns(is_one, values.shape)
            acc += jnp.where(is_one, values, jnp.zeros_like(values)) * m.columns(weight, values.shape)
        return raised, total, acc

    highest = ops.load(sinks.at[group], PER_LANE)
    total = jnp.where(highest > m.LOWEST, jnp.ones_like(highest), jnp.zeros_like(highest))
    state = (highest, total, ops.full((LANES, _PART), 0.0, MATRIX))
    rounds = lax.div(most[group] + _AT_ONCE - 1, _AT_ONCE)
    _, total, acc = lax.fori_loop(0, rounds, several, state)
    inverse = 1.0 / jnp.where(total > 0, total, jnp.ones_like(total))
    out[group, part] = acc * m.columns(inverse, acc.shape)
