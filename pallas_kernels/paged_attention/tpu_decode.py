"""Decode attention for Mosaic TPU: rows of one query, their K and V written to the pool in the same launch.

An item is one KV tile of one row. Items stand in the order of rows and positions; a step takes `items` of them,
of whichever rows, and runs three stages that hide each other's latency:

    step t     scores of its items (QK), while blocks of step t + 2 are fetched
    step t-1   softmax, then the weighted sum of values (PV)
    step t-2   merge into the row's running state, in ascending position; the last item's result stays

The vectors of a token are not taken apart by head: all heads' keys are columns of one matrix, (token, head) in
order, and a column of another head is hidden from a query by the mask that also hides what is not visible. What
a row computes depends on its own items alone. Loads of a 32-bit word bring K and V of a head together. Scales of
int8 multiply columns: K's the scores, V's the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_config import LANES, DecodeConfig, DecodeShape
from pallas_kernels.paged_attention.tpu_decode_columns import (
    column_scales,
    load_vectors,
    number_columns,
    tokens_of,
    words_of,
)
from pallas_kernels.paged_attention.tpu_decode_movement import Movement
from pallas_kernels.paged_attention.tpu_decode_scratch import (
    ScaleScratch,
    Scratch,
    named,
    scale_scratch_shapes,
    scratch_shapes,
)
from pallas_kernels.paged_attention.tpu_schedule import DecodeSchedule

_HIDDEN = -1e30  # finite: the difference of two is 0, not NaN
_LOG2_E = math.log2(math.e)


def decode(
    q: jax.Array,  # [T, N, Hp]
    slabs: jax.Array,  # [T, vectors, Hp], the tokens' K and V as the pool keeps them
    values: jax.Array,  # [P, C, vectors, Hp]
    scales: jax.Array | None,  # [P, 2K, C] float32 of int8, those of the tokens among them
    schedule: DecodeSchedule,
    *,
    shape: DecodeShape,
    config: DecodeConfig,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,  # [N, 128] float32, lanes alike
    window: int | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # [T, N, Hp], zero where no decoding row has its token; the pool's values
    """Attention of all rows of one query, whose slabs are written to the pool."""
    T, C = len(q), shape.block_size
    body = functools.partial(
        _kernel, shape=shape, config=config, scale=scale, soft_cap=soft_cap, window=window, interpret=bool(interpret)
    )
    inputs = [q, slabs, *([] if sinks is None else [sinks])]
    whole = [pl.BlockSpec(a.shape, lambda *_, d=a.ndim: (0,) * d) for a in inputs]
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    pools = [values, *([] if scales is None else [scales])]
    prefetched = schedule.arrays()
    assert values.shape[1] == C, "the pool has other blocks than the kernel was made for"
    return pl.pallas_call(
        functools.partial(body, has_sinks=sinks is not None, has_scales=scales is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[*whole, *[anywhere] * len(pools)],
            out_specs=[anywhere, anywhere],
            scratch_shapes=[
                *scratch_shapes(T, q.dtype, values.dtype, shape, config),
                *(() if scales is None else scale_scratch_shapes(shape, config)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(values.shape, values.dtype)],
        input_output_aliases={len(prefetched) + len(inputs): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=config.vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attention_decode",
    )(*prefetched, *inputs, *pools)


def _kernel(
    # prefetched
    sizes,  # [2] int32: steps, rows
    fetches,  # [steps] int32: 2 * blocks to fetch + whether an item has tokens that are not visible
    places,  # [items] int32: where the row's new token stands, counted from the item's first token
    first_blocks,  # [items] int32: index of the item's first block in tables
    tokens,  # [items] int32: 2 * token + whether this is the row's first item
    tables,  # [R * M and some] int32
    # inputs, outputs, scratch
    *refs,
    shape: DecodeShape,
    config: DecodeConfig,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    interpret: bool,
    has_sinks: bool,
    has_scales: bool,
):
    q_ref, slabs_ref, *refs = refs  # [T, N, Hp], [T, vectors, Hp]
    sinks_ref = refs.pop(0) if has_sinks else None  # [N, 128]
    scales_ref = refs.pop(1) if has_scales else None  # [P, 2K, C] in HBM
    _, out_ref, pool_ref, *refs = refs  # [T, N, Hp] and [P, C, vectors, Hp] in HBM
    xs = named(ScaleScratch, refs[-len(dataclasses.fields(ScaleScratch)) :]) if has_scales else None
    x = named(Scratch, refs[: len(dataclasses.fields(Scratch))])
    S, C, tile, N = config.items, shape.block_size, config.tile_kv, shape.num_heads
    T, bpt, width = q_ref.shape[0], tile // C, config.chunk
    chunks = shape.chunks(tile, width)
    unit = _LOG2_E * (scale if soft_cap is None else soft_cap)  # scores are kept in units of which this is one bit
    precision = jax.lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    words = None if interpret else words_of(x.tiles, shape)

    moves = Movement(
        places=places,
        first_blocks=first_blocks,
        tokens=tokens,
        tables=tables,
        slabs=slabs_ref,
        pool=pool_ref,
        scale_pool=scales_ref,
        scratch=x,
        scales=xs,
        shape=shape,
        config=config,
        window=window,
    )

    def is_first(t, s):
        return (tokens[moves.item(t, s)] & 1) == 1

    def load(t, s, chunk, vector):
        """Keys or values of a chunk: [width, Hp]."""
        buffer = jax.lax.rem(t + config.buffers, config.buffers)
        return load_vectors(x.tiles, words, buffer, s * tile + chunk.token, width, shape, vector).astype(
            shape.compute_dtype
        )

    def score(t, starts):
        """QK of step t; `starts` are DMA starts to be issued between the dots."""
        for s in range(S):
            at = places[moves.item(t, s)]
            q = q_ref[jnp.minimum(moves.token(t, s), T - 1)].astype(shape.compute_dtype)
            if xs is not None:
                buffer = jax.lax.rem(t, config.buffers)
                for b in range(bpt):
                    xs.tile[:, pl.ds(b * C, C)] = xs.blocks[buffer, s * bpt + b]
            top = jnp.full((N, LANES), _HIDDEN)
            for n, chunk in enumerate(chunks):
                raw = dot(q, load(t, s, chunk, chunk.key), (((1,), (1,)), ((), ())))  # [N, width]
                done = (s * len(chunks) + n + 1) * len(starts) // (S * len(chunks))
                for start in starts[(s * len(chunks) + n) * len(starts) // (S * len(chunks)) : done]:
                    start()
                for lane in range(0, width, LANES):
                    y = raw[:, lane : lane + LANES]
                    if xs is not None:
                        key_scales, value_scales = column_scales(xs.tile, chunk.part, chunk.column + lane, shape)
                        y = y * key_scales
                        token = tokens_of((1, LANES), chunk.column + lane, shape)
                        seen = token <= at if window is None else (token <= at) & (token > at - window)
                        xs.values[s, :, pl.ds(n * width + lane, LANES)] = jnp.where(seen, value_scales, 0.0)
                    if soft_cap is not None:
                        y = jnp.tanh(y * (scale / soft_cap))
                    column = chunk.column + lane
                    token = x.columns[chunk.part, :, pl.ds(column % shape.period, LANES)]
                    high = at - column // shape.period * (shape.period // shape.words)
                    visible = token <= high
                    if window is not None:
                        visible &= token > high - window
                    y = jnp.where(visible, y, _HIDDEN)
                    x.scores[s, :, pl.ds(n * width + lane, LANES)] = y
                    top = jnp.maximum(top, y)
            x.tops[s] = jnp.broadcast_to(jnp.max(top, axis=1, keepdims=True), (N, LANES))

    def softmax(t):
        """Weights of step t, and what they leave of the rows' states."""
        state, total = x.top[...], x.total[...]
        for s in range(S):
            before = jnp.where(is_first(t, s), _HIDDEN, state)
            state = jnp.maximum(before, x.tops[s])
            decay = jnp.exp2((before - state) * unit)
            sum_ = jnp.zeros((N, LANES))
            half = len(chunks) * width // (2 if shape.halves else 1)
            for column in range(0, half, LANES):
                parts = [
                    jnp.exp2((x.scores[s, :, pl.ds(c, LANES)] - state) * unit)
                    for c in range(column, len(chunks) * width, half)
                ]
                sum_ += sum(parts[1:], parts[0])
                if xs is not None:
                    parts = [part * xs.values[s, :, pl.ds(column + i * half, LANES)] for i, part in enumerate(parts)]
                stacked = jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]
                x.weights[s, :, pl.ds(column, LANES)] = stacked.astype(x.weights.dtype)
            total = jnp.where(is_first(t, s), 0.0, total * decay) + jnp.sum(sum_, axis=1, keepdims=True)
            x.decays[s] = decay
            sink = 0.0 if sinks_ref is None else jnp.exp2(sinks_ref[...] * _LOG2_E - state * unit)
            x.totals[s] = total + sink
        x.top[...] = state
        x.total[...] = total

    def weigh(t):
        """PV of step t."""
        pairs = len(chunks) // (2 if shape.halves else 1)
        for s in range(S):
            acc = jnp.zeros((x.weights.shape[1], shape.lanes * (2 if shape.halves else 1)))
            for n in range(pairs):
                v = [load(t, s, chunk, chunk.value) for chunk in chunks[n::pairs]]
                v = jnp.concatenate(v, axis=1) if len(v) > 1 else v[0]
                acc += dot(x.weights[s, :, pl.ds(n * width, width)], v, (((1,), (0,)), ((), ())))
            x.sums[s] = acc[:N, : shape.lanes] + acc[N:, shape.lanes :] if shape.halves else acc

    def merge(t):
        """Adds step t to the rows' states and stores their results as they stand."""
        acc = x.sum[...]
        for s in range(S):
            acc = jnp.where(is_first(t, s), x.sums[s], acc * x.decays[s][:, :1] + x.sums[s])
            x.outs[moves.token(t, s)] = (acc / x.totals[s][:, :1]).astype(x.outs.dtype)
        x.sum[...] = acc

    def step(t, _):
        info = fetches[t]
        moves.arrive(t, info >> 1)
        pl.when((info & 1) == 1)(functools.partial(moves.clear, t))
        moves.insert(t)
        merge(t - 2)
        softmax(t - 1)
        score(t, moves.fetch(t + config.ahead))
        moves.write(t)
        weigh(t - 1)
        return 0

    def ahead(t, _):
        for start in moves.fetch(t):
            start()
        return 0

    @pl.when(sizes[1] < T)
    def _():
        x.outs[...] = jnp.zeros(x.outs.shape, x.outs.dtype)

    @pl.when(sizes[0] > 0)
    def _():
        steps = sizes[0]
        jax.lax.fori_loop(0, config.ahead, ahead, 0)
        number_columns(x.columns, shape)
        jax.lax.fori_loop(0, steps, step, 0)
        merge(steps - 2)
        softmax(steps - 1)
        weigh(steps - 1)
        merge(steps - 1)

    result = pltpu.make_async_copy(x.outs.at[pl.ds(0, T)], out_ref, x.stored)
    result.start()

    moves.settle(sizes[1])
    result.wait()
