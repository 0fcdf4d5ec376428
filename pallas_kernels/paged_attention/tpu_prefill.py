"""Attention of rows with several queries (prefill chunks, encoders) for the TPU, in Mosaic.

One launch walks the query tiles of the step. For a query tile it walks the KV tiles that hold what the tile may see;
their blocks come by DMA, one KV tile ahead, across query tiles too. The keys of a KV tile are cut into steps and the
query tile into chunks: an *item* is (step, KV head, chunk). Its three phases run as a pipeline over items,

    keys      item i + 1    logits = q k^T                       MXU
    softmax   item i        weights, running maximum and sum     VALU, EUP
    values    item i        sums = sums * kept + weights v       MXU

in one straight stretch of code: the MXU has keys to go on with while weights are made. It is written in parts of the
item's queries, for the compiler loads as much of q as it has registers for. Logits are in units of log2.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu_prefill_config import ALIGNMENT, LANES, PrefillShape
from pallas_kernels.paged_attention.tpu_prefill_kv import enter, fetch_blocks
from pallas_kernels.paged_attention.tpu_prefill_math import (
    HIDDEN,
    dot_keys,
    dot_values,
    fold_lanes,
    repeat_lanes,
    softmax_step,
    visible,
)
from pallas_kernels.paged_attention.tpu_prefill_schedule import PrefillSchedule, Tile
from pallas_kernels.paged_attention.tpu_prefill_tiles import copy_q, finish, start_sums, wait_out
from pallas_kernels.paged_attention.tpu_prefill_walk import Walk

_LOG2_E = 1.4426950408889634


def prefill_attention(
    q: jax.Array,  # [T, N, H]
    pool: KVPool,  # the step's own K and V are in it
    schedule: PrefillSchedule,
    *,
    scale: float,
    soft_cap: float | None,
    sinks: jax.Array | None,  # [N]
    interpret: Any = False,
) -> jax.Array:  # [T, N, H], the dtype of q; tokens of no query tile hold anything, NaN too
    """softmax(scale * q k^T + mask) v of the tokens of the schedule's query tiles, accumulated in float32."""
    T, N, H = q.shape
    values, scales = pool.values, pool.scales
    config, shape = schedule.config, PrefillShape.of(num_heads=N, dtype=q.dtype, pool=pool)
    config.check(shape)
    heads = _heads_first(q, scale * _LOG2_E if soft_cap is None else scale / soft_cap, config.tile_q, shape.lanes)
    arguments = [heads, values.reshape(len(values), -1, shape.lanes) if shape.is_dense else values]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs = [anywhere, anywhere]
    if scales is not None:
        arguments.append(scales)
        specs.append(anywhere)
    if sinks is not None:
        lanes = (len(sinks), 1, LANES)
        arguments.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None] * _LOG2_E, lanes))
        specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            config=config,
            max_blocks=schedule.max_blocks,
            window=schedule.window,
            causal=schedule.causal,
            cap=None if soft_cap is None else soft_cap * _LOG2_E,
            has_scales=scales is not None,
            has_sinks=sinks is not None,
        ),
        out_shape=jax.ShapeDtypeStruct(heads.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=specs,
            out_specs=anywhere,
            scratch_shapes=[
                {name: pltpu.VMEM(size, jnp.dtype(dtype)) for name, (size, dtype) in config.buffers(shape).items()},
                {name: pltpu.SemaphoreType.DMA(()) for name in ("q", "blocks", "out")},
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=config.vmem_bytes(shape) * 5 // 4 + 2**21, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="prefill_attention",
    )(schedule.num_tiles, schedule.tiles, schedule.block_tables, *arguments)
    out = out[..., H : 2 * H] if shape.is_packed else out[..., :H]
    return out[:, :T].transpose(1, 0, 2)


def _heads_first(q: jax.Array, factor: float, tile_q: int, lanes: int) -> jax.Array:  # -> [N, tokens, lanes]
    """q times factor, with tokens next to lanes as the kernel's matrix products want them."""
    T, _, H = q.shape
    tokens = -(-max(T, tile_q) // ALIGNMENT) * ALIGNMENT
    heads = (q.astype(jnp.float32) * factor).astype(q.dtype).transpose(1, 0, 2)
    return jnp.pad(heads, ((0, 0), (0, tokens - T), (0, lanes - H)))


def _kernel(num_tiles, tiles, block_tables, q, pool, *rest, has_scales: bool, has_sinks: bool, **static: Any) -> None:
    rest = list(rest)
    scales = rest.pop(0) if has_scales else None
    sinks = rest.pop(0) if has_sinks else None
    out, buffers, semaphores = rest
    walk = Walk(
        num_tiles=num_tiles[0],
        tiles=tiles,
        block_tables=block_tables,
        q=q,
        pool=pool,
        scales=scales,
        sinks=sinks,
        out=out,
        buffers=buffers,
        semaphores=semaphores,
        **static,
    )
    _run(walk)


def _run(w: Walk) -> None:
    @pl.when(w.num_tiles > 0)
    def _():
        first = Tile.read(w.tiles, jnp.int32(0))
        copy_q(w, 0).start()
        fetch_blocks(w, first, first.first_kv)
        w.buffers["border"][...] = jnp.zeros_like(w.buffers["border"])
        jax.lax.fori_loop(0, w.num_tiles, lambda t, _: _run_tile(w, t), None)
        wait_out(w, w.num_tiles - 1)


def _run_tile(w: Walk, t) -> None:
    """All of one query tile: the pipeline over its items."""
    tile = Tile.read(w.tiles, t)
    start_sums(w, tile)
    copy_q(w, t).wait()

    @pl.when(t + 1 < w.num_tiles)
    def _():
        copy_q(w, t + 1).start()

    enter(w, t, tile, tile.first_kv)
    first = w.first_of(tile, tile.first_kv)
    for part in range(w.config.parts):
        _keys(w, t, first, part, 0)
    jax.lax.fori_loop(tile.first_kv, tile.end_kv, lambda j, i: _run_kv_tile(w, t, tile, j, i), jnp.int32(0))
    finish(w, t, tile)


def _run_kv_tile(w: Walk, t, tile: Tile, j, i) -> Any:
    """The items of one KV tile; i and the result count the query tile's items so far."""
    (first_step, end_step), (first_chunk, end_chunk) = w.steps_of(tile, j), w.chunks_of(tile, j)
    last = i + (end_step - first_step) * w.shape.num_kv_heads * (end_chunk - first_chunk) - 1
    following = w.first_of(tile, jnp.minimum(j + 1, tile.end_kv - 1))

    def one_item(i, item):
        after = w.advance(item, first_chunk, end_chunk)

        @pl.when((i == last) & (j + 1 < tile.end_kv))
        def _():
            enter(w, t, tile, j + 1)

        ahead = tuple(jnp.where(i == last, a, b) for a, b in zip(following, after, strict=True))
        has_hidden = w.has_hidden(tile, j, item)

        def run(slot: int, masked: bool) -> None:
            for part in range(w.config.parts):
                _softmax(w, tile, j, item, part, slot, masked)
                _keys(w, t, ahead, part, 1 - slot)
                _values(w, j, item, part)

        for slot in (0, 1):

            @pl.when(i % 2 == slot)
            def _(slot=slot):
                pl.when(has_hidden)(lambda: run(slot, True))
                pl.when(~has_hidden)(lambda: run(slot, False))

        return after

    jax.lax.fori_loop(i, last + 1, one_item, (first_step, jnp.int32(0), first_chunk))
    return last + 1


def _keys(w: Walk, t, item, part: int, slot: int) -> None:
    step, head, chunk = item
    G = w.shape.group
    q = w.buffers["q"][t % 2, pl.ds(head * G, G), w.tokens(chunk, part), :]
    logits = dot_keys(q.reshape(-1, w.shape.lanes), w.buffers["keys"][step, head])
    w.buffers[f"logits{slot}"][w.rows(part)] = logits


def _softmax(w: Walk, tile: Tile, j, item, part: int, slot: int, masked: bool) -> None:
    step, head, chunk = item
    buffers, rows, at = w.buffers, w.rows(part), w.slot_of(item)
    logits = buffers[f"logits{slot}"][rows]
    if w.scales is not None:
        logits = logits * buffers["scales"][j % 2, step, head, pl.ds(0, 1), :]
    if w.cap is not None:
        logits = w.cap * jnp.tanh(logits)
    if masked:
        seen = visible(
            (w.config.part_q, w.config.step_kv),
            first_query=tile.position + chunk * w.config.chunk_q + part * w.config.part_q,
            first_key=w.start_of(j, item),
            end_position=tile.end_position,
            window=w.window,
            causal=w.causal,
        )
        heads = logits.reshape(w.shape.group, *seen.shape)
        logits = jnp.where(seen[None], heads, HIDDEN).reshape(logits.shape)
    weights, highest, kept = softmax_step(logits, buffers["highest"][at, rows])
    buffers["highest"][at, rows] = highest
    buffers["total"][at, rows] = buffers["total"][at, rows] * kept + fold_lanes(weights)
    buffers["kept"][rows] = kept
    if w.scales is not None:
        weights = weights * buffers["scales"][j % 2, step, head, pl.ds(1, 1), :]
    buffers["weights"][rows] = weights.astype(w.shape.dtype)


def _values(w: Walk, j, item, part: int) -> None:
    step, head, _ = item
    buffers, rows, at = w.buffers, w.rows(part), w.slot_of(item)
    added = dot_values(buffers["weights"][rows], buffers["values"][j % 2, step, head])
    kept = repeat_lanes(buffers["kept"][rows], w.shape.lanes)
    buffers["sums"][at, rows] = buffers["sums"][at, rows] * kept + added
