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

from pallas_kernels.paged_attention.tpu_config import LANES, LOOK_BACK, DecodeConfig, DecodeShape
from pallas_kernels.paged_attention.tpu_schedule import DecodeSchedule

_HIDDEN = -1e30  # finite: the difference of two is 0, not NaN
_LOG2_E = math.log2(math.e)
_CLEARED = 16  # tokens zeroed by one store


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scratch:
    """References of one launch. S: items of a step. X: columns of an item's scores. Hp: lanes of a vector."""

    tiles: Any  # [buffers, S * tile_kv + 1, vectors, Hp] of the pool's dtype; the last token takes what has no place
    scores: Any  # [S, N, X] float32, masked
    weights: Any  # [S, N or 2N, X or X / 2], exp2 of scores less the row's highest; halves of the columns stacked
    sums: Any  # [S, N, Hp] float32, weights times values
    tops: Any  # [S, N, 128] float32, each item's highest score
    decays: Any  # [S, N, 128] float32, what an item's new highest score leaves of the state before it
    totals: Any  # [S, N, 128] float32, the row's sum of weights up to the item, sink included
    columns: Any  # [parts, N, period] int32, token of a column, or a large number where its head is not the query's
    outs: Any  # [T + 1, N, Hp]; the last token takes what has no place
    sum: Any  # [N, Hp] float32: the running state of the row in work
    top: Any  # [N, 128] float32
    total: Any  # [N, 128] float32
    fetched: Any  # DMA semaphore of each buffer
    written: Any  # DMA semaphore
    stored: Any  # DMA semaphore


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ScaleScratch:
    """What is there for an int8 pool besides."""

    blocks: Any  # [buffers, S * blocks of a tile, 2K, C] float32
    tile: Any  # [2K, tile_kv + 128] float32: an item's, tokens side by side
    values: Any  # [S, 1, X] float32, V's of each column, zero for tokens that are not visible
    fetched: Any  # DMA semaphore of each buffer


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
                *_scratch_shapes(T, q.dtype, values.dtype, shape, config),
                *(() if scales is None else _scale_scratch_shapes(shape, config)),
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


def _scratch_shapes(
    num_tokens: int, dtype: jnp.dtype, pool_dtype: jnp.dtype, shape: DecodeShape, config: DecodeConfig
) -> tuple[Any, ...]:
    """In the order of _Scratch."""
    S, N, X, H, f32 = config.items, shape.num_heads, shape.columns(config.tile_kv), shape.lanes, jnp.float32
    stacked = 2 if shape.halves else 1
    return (
        pltpu.VMEM((config.buffers, S * config.tile_kv + 1, shape.vectors, H), pool_dtype),
        pltpu.VMEM((S, N, X), f32),
        pltpu.VMEM((S, stacked * N, X // stacked), shape.compute_dtype),
        pltpu.VMEM((S, N, H), f32),
        *(pltpu.VMEM((S, N, LANES), f32) for _ in range(3)),
        pltpu.VMEM((shape.parts, N, shape.period), jnp.int32),
        pltpu.VMEM((num_tokens + 1, N, H), dtype),
        pltpu.VMEM((N, H), f32),
        pltpu.VMEM((N, LANES), f32),
        pltpu.VMEM((N, LANES), f32),
        pltpu.SemaphoreType.DMA((config.buffers,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
    )


def _scale_scratch_shapes(shape: DecodeShape, config: DecodeConfig) -> tuple[Any, ...]:
    """In the order of _ScaleScratch."""
    pairs, S, tile = 2 * shape.num_kv_heads, config.items, config.tile_kv
    return (
        pltpu.VMEM((config.buffers, S * (tile // shape.block_size), pairs, shape.block_size), jnp.float32),
        pltpu.VMEM((pairs, tile + LANES), jnp.float32),
        pltpu.VMEM((S, 1, shape.columns(tile)), jnp.float32),
        pltpu.SemaphoreType.DMA((config.buffers,)),
    )


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
    xs = _named(_ScaleScratch, refs[-len(dataclasses.fields(_ScaleScratch)) :]) if has_scales else None
    x = _named(_Scratch, refs[: len(dataclasses.fields(_Scratch))])
    S, C, tile, N = config.items, shape.block_size, config.tile_kv, shape.num_heads
    T, bpt, width = q_ref.shape[0], tile // C, config.chunk
    chunks = shape.chunks(tile, width)
    unit = _LOG2_E * (scale if soft_cap is None else soft_cap)  # scores are kept in units of which this is one bit
    precision = jax.lax.Precision.HIGHEST if shape.compute_dtype == jnp.float32 else None
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    words = None if interpret else _words(x.tiles, shape)

    def item(t, s):
        return (t + LOOK_BACK) * S + s

    def is_first(t, s):
        return (tokens[item(t, s)] & 1) == 1

    def fetch(t):
        """Starts, one function a block, of the DMAs of step t's blocks."""
        buffer = jax.lax.rem(t, config.buffers)

        def start(s, b):
            at = places[item(t, s)]
            block = tables[first_blocks[item(t, s)] + b]
            wanted = at >= b * C
            if window is not None:
                wanted &= at - window + 1 < (b + 1) * C

            @pl.when(wanted)
            def _():
                to = x.tiles.at[buffer, pl.ds(s * tile + b * C, C)]
                pltpu.make_async_copy(pool_ref.at[block], to, x.fetched.at[buffer]).start()
                if xs is not None and scales_ref is not None:
                    to = xs.blocks.at[buffer, s * bpt + b]
                    pltpu.make_async_copy(scales_ref.at[block], to, xs.fetched.at[buffer]).start()

        return [functools.partial(start, s, b) for s in range(S) for b in range(bpt)]

    def clear(t, buffer):
        """Zeroes tokens of step t that their query may not see, for they may be NaN."""

        def zeroed(begin, end):
            many = begin + (end - begin) // _CLEARED * _CLEARED
            for first, last, size in ((begin, many, _CLEARED), (many, end, 1)):

                @pl.loop(first, last, step=size)
                def _(i, size=size):
                    x.tiles[buffer, pl.ds(i, size)] = jnp.zeros((size, *x.tiles.shape[2:]), x.tiles.dtype)

        for s in range(S):
            at = places[item(t, s)]
            zeroed(s * tile + jnp.where(at < 0, tile, jnp.minimum(at + 1, tile)), (s + 1) * tile)
            if window is not None:
                zeroed(s * tile, s * tile + jnp.clip(at - window + 1, 0, tile))

    def insert(t, buffer):
        """Puts the new tokens of step t's rows in their places in the buffer."""
        for s in range(S):
            at = places[item(t, s)]
            token = jnp.minimum(tokens[item(t, s)] >> 1, T - 1)
            to = jnp.where((at >= 0) & (at < tile), s * tile + at, S * tile)
            x.tiles[buffer, to] = slabs_ref[token]

    def write(t):
        """Starts the DMAs that bring the new tokens of step t's rows to the pool."""
        for s in range(S):
            at = places[item(t, s)]
            block = tables[first_blocks[item(t, s)] + jnp.clip(at // C, 0, bpt - 1)]

            @pl.when((at >= 0) & (at < tile))
            def _(at=at, block=block, s=s):
                to = pool_ref.at[block, jax.lax.rem(at, C)]
                pltpu.make_async_copy(slabs_ref.at[tokens[item(t, s)] >> 1], to, x.written).start()

    def load(t, s, chunk, vector):
        """Keys or values of a chunk: [width, Hp]."""
        buffer = jax.lax.rem(t + config.buffers, config.buffers)
        return _load(x.tiles, words, buffer, s * tile + chunk.token, width, shape, vector).astype(shape.compute_dtype)

    def score(t, starts):
        """QK of step t; `starts` are DMA starts to be issued between the dots."""
        for s in range(S):
            at = places[item(t, s)]
            q = q_ref[jnp.minimum(tokens[item(t, s)] >> 1, T - 1)].astype(shape.compute_dtype)
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
                        key_scales, value_scales = _column_scales(xs.tile, chunk.part, chunk.column + lane, shape)
                        y = y * key_scales
                        token = _tokens_of((1, LANES), chunk.column + lane, shape)
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
            x.outs[tokens[item(t, s)] >> 1] = (acc / x.totals[s][:, :1]).astype(x.outs.dtype)
        x.sum[...] = acc

    def step(t, _):
        buffer = jax.lax.rem(t, config.buffers)
        info = fetches[t]
        fetched = x.tiles.at[buffer, pl.ds(0, (info >> 1) * C)]
        pltpu.make_async_copy(fetched, fetched, x.fetched.at[buffer]).wait()
        if xs is not None:
            fetched = xs.blocks.at[buffer, pl.ds(0, info >> 1)]
            pltpu.make_async_copy(fetched, fetched, xs.fetched.at[buffer]).wait()
        pl.when((info & 1) == 1)(functools.partial(clear, t, buffer))
        insert(t, buffer)
        merge(t - 2)
        softmax(t - 1)
        score(t, fetch(t + config.ahead))
        write(t)
        weigh(t - 1)
        return 0

    def ahead(t, _):
        for start in fetch(t):
            start()
        return 0

    jax.lax.fori_loop(0, config.ahead, ahead, 0)

    @pl.when(sizes[1] < T)
    def _():
        x.outs[...] = jnp.zeros(x.outs.shape, x.outs.dtype)

    _number_columns(x.columns, shape)
    steps = sizes[0]
    jax.lax.fori_loop(0, steps, step, 0)
    merge(steps - 2)
    softmax(steps - 1)
    weigh(steps - 1)
    merge(steps - 1)
    result = pltpu.make_async_copy(x.outs.at[pl.ds(0, T)], out_ref, x.stored)
    result.start()

    @pl.when(sizes[1] > 0)
    def _():
        written = slabs_ref.at[pl.ds(0, sizes[1])]
        pltpu.make_async_copy(written, written, x.written).wait()

    result.wait()


def _named(kind: Any, refs: list[Any]) -> Any:
    return kind(**{f.name: r for f, r in zip(dataclasses.fields(kind), refs, strict=True)})


def _tokens_of(columns: tuple[int, int], first: int, shape: DecodeShape) -> jax.Array:
    """The token of an item in each of so many columns, of which the first is `first`."""
    return (first + jax.lax.broadcasted_iota(jnp.int32, columns, 1)) // shape.words


def _column_scales(tile: Any, part: int, column: int, shape: DecodeShape) -> tuple[jax.Array, jax.Array]:
    """Scales of K and of V, [1, 128] each, of a part's columns column .. column + 127. tile: [2K, tokens]."""
    first, last = column // shape.words, (column + LANES - 1) // shape.words
    begin = first // LANES * LANES if last // LANES == first // LANES else first
    scales = tile[:, begin : begin + LANES]
    rows, lanes = (jax.lax.broadcasted_iota(jnp.int32, scales.shape, axis) for axis in (0, 1))
    if shape.words > 1:
        tokens = _tokens_of(scales.shape, column, shape) - begin
        scales = jnp.take_along_axis(scales, tokens, axis=1, mode="promise_in_bounds")
    own = 2 * (jax.lax.rem(column + lanes, shape.words) * shape.parts + part)
    keys, values = (jnp.sum(jnp.where(rows == own + i, scales, 0.0), axis=0, keepdims=True) for i in (0, 1))
    return keys, values


def _number_columns(columns: Any, shape: DecodeShape) -> None:
    """Fills _Scratch.columns."""
    N, width = columns.shape[1:]
    column = jax.lax.broadcasted_iota(jnp.int32, (N, width), 1)
    head = jax.lax.broadcasted_iota(jnp.int32, (N, width), 0) // shape.group
    for part in range(shape.parts):
        is_own = jax.lax.rem(column, shape.words) * shape.parts + part == head
        columns[part] = jnp.where(is_own, column // shape.words, jnp.int32(2**30))


def _words(tiles: Any, shape: DecodeShape) -> Any:
    """The buffers as rows of 32-bit words: [buffers, tokens * words, Hp]."""
    buffers, tokens, _, lanes = tiles.shape
    if shape.itemsize < 4:
        tiles = tiles.bitcast(jnp.uint32)
    return tiles.reshape(buffers, tokens * tiles.shape[2], lanes)


def _load(tiles: Any, words: Any, buffer: Any, token: int, width: int, shape: DecodeShape, vector: int) -> jax.Array:
    """Vectors vector, vector + V, ... of chunk's tokens, V of them a word (two with 32 bits: K, V): [width, Hp].

    The interpreter has no views of references: there a value is cast instead.
    """
    stride = shape.stride
    if words is None:
        block = tiles[buffer, pl.ds(token, width // shape.words)]
        if shape.itemsize == 4:
            return block[:, vector::stride].reshape(width, shape.lanes)
        rows = pltpu.bitcast(block, jnp.uint32).reshape(width, shape.lanes)
    elif shape.itemsize == 4:
        begin = token * shape.vectors + vector
        return words[buffer, pl.ds(begin, width, stride=stride), :]
    else:
        rows = words[buffer, pl.ds(token * shape.words, width), :]
    bits = 8 * shape.itemsize
    rows = rows >> (vector * bits) if vector else rows
    return pltpu.bitcast(rows.astype(jnp.dtype(f"uint{bits}")), shape.pool_dtype)
