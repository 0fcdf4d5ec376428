"""Attention of rows with several queries (prefill chunks, encoders) for the TPU, in Mosaic.

One launch walks the query tiles of the step. For a query tile it walks the KV tiles that hold what the tile may see;
their blocks come by DMA, one KV tile ahead, across query tiles too. The keys of a KV tile are cut into steps and the
query tile into chunks: an *item* is (KV tile, step, KV head, chunk), and its queries are cut into parts. Three phases
run as a pipeline over the parts of all items,

    keys      part p + 1    logits = q k^T, masked; tops              MXU
    softmax   part p        weights, running maximum and sum          VALU, EUP
    values    part p - 1    sums = sums * kept + weights v            MXU

and what one part needs of another is there before its turn: in the straight code of an item the units never wait for
each other but where it begins and ends. Logits are in units of log2.
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
from pallas_kernels.paged_attention.tpu_prefill_walk import Item, Walk

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
        jax.lax.fori_loop(0, w.num_tiles, functools.partial(_run_tile, w), None)
        wait_out(w, w.num_tiles - 1)


def _run_tile(w: Walk, t, _) -> None:
    """All of one query tile: the pipeline over its items."""
    tile = Tile.read(w.tiles, t)
    start_sums(w, tile)
    copy_q(w, t).wait()

    @pl.when(t > 0)
    def _():
        wait_out(w, t - 1)

    @pl.when(t + 1 < w.num_tiles)
    def _():
        copy_q(w, t + 1).start()

    enter(w, t, tile, tile.first_kv)
    first, end = w.first_of(tile, tile.first_kv), w.config.parts - 1
    _keys(w, t, tile, first, 0, masked=True)
    w.buffers["weights"][w.pair(end)] = jnp.zeros_like(w.buffers["weights"][w.pair(end)])  # before the first item
    w.buffers["kept"][w.pair(end)] = jnp.ones_like(w.buffers["kept"][w.pair(end)])
    last = jax.lax.fori_loop(tile.first_kv, tile.end_kv, lambda j, before: _run_kv_tile(w, t, tile, j, before), first)
    _values(w, last, end)
    finish(w, t, tile)


def _run_kv_tile(w: Walk, t, tile: Tile, j, before: Item) -> Item:
    """The items of one KV tile, of which the last is returned. before: the item before the first."""
    (first_step, end_step), (first_chunk, end_chunk) = w.steps_of(tile, j), w.chunks_of(tile, j)
    last = (end_step - first_step) * w.shape.num_kv_heads * (end_chunk - first_chunk) - 1
    following = w.first_of(tile, jnp.minimum(j + 1, tile.end_kv - 1))

    def one_item(i, items):
        before, item = items
        after = w.advance(item, first_chunk, end_chunk)

        @pl.when((i == last) & (j + 1 < tile.end_kv))
        def _():
            enter(w, t, tile, j + 1)

        ahead = jax.tree.map(functools.partial(jnp.where, i == last), following, after)
        has_hidden = w.has_hidden(tile, item) | w.has_hidden(tile, ahead)
        pl.when(has_hidden)(lambda: _run_item(w, t, tile, (before, item, ahead), masked=True))
        pl.when(~has_hidden)(lambda: _run_item(w, t, tile, (before, item, ahead), masked=False))
        return item, after

    return jax.lax.fori_loop(0, last + 1, one_item, (before, w.first_of(tile, j)))[0]


def _run_item(w: Walk, t, tile: Tile, items: tuple[Item, Item, Item], *, masked: bool) -> None:
    """Softmax of the middle one of three items, keys of the part that follows and values of the part before each.

    Phases stand in this order because those of parts that share a buffer do: each is read before it is filled again.
    """
    parts = [(item, part) for item in items for part in range(w.config.parts)]
    for at in range(w.config.parts, 2 * w.config.parts):
        _values(w, *parts[at - 1])
        _softmax(w, *parts[at])
        _keys(w, t, tile, *parts[at + 1], masked=masked)


def _keys(w: Walk, t, tile: Tile, item: Item, part: int, *, masked: bool) -> None:
    j, step, head, chunk = item
    buffers, rows, G = w.buffers, w.rows(part), w.shape.group
    q = buffers["q"][t % 2, pl.ds(head * G, G), w.tokens(chunk, part), :]
    logits = dot_keys(q.reshape(-1, w.shape.lanes), buffers["keys"][j % 2, step, head])
    if w.scales is not None:
        logits = logits * buffers["scales"][j % 2, step, head, pl.ds(0, 1), :]
    if w.cap is not None:
        logits = w.cap * jnp.tanh(logits)
    if masked:
        seen = visible(
            (w.config.part_q, w.config.step_kv),
            first_query=tile.position + chunk * w.config.chunk_q + part * w.config.part_q,
            first_key=w.start_of(item),
            end_position=tile.end_position,
            window=w.window,
            causal=w.causal,
        )
        logits = jnp.where(seen[None], logits.reshape(G, *seen.shape), HIDDEN).reshape(logits.shape)
    buffers["logits"][rows] = logits
    buffers["tops"][w.pair(part)] = fold_lanes(logits, jnp.maximum)


def _softmax(w: Walk, item: Item, part: int) -> None:
    j, step, head, _ = item
    buffers, rows, at = w.buffers, w.rows(part), w.slot_of(item)
    weights, highest, kept = softmax_step(
        buffers["logits"][rows], buffers["tops"][w.pair(part)], buffers["highest"][at, rows]
    )
    buffers["highest"][at, rows] = highest
    buffers["total"][at, rows] = buffers["total"][at, rows] * kept + fold_lanes(weights, jnp.add)
    buffers["kept"][w.pair(part)] = kept
    if w.scales is not None:
        weights = weights * buffers["scales"][j % 2, step, head, pl.ds(1, 1), :]
    buffers["weights"][w.pair(part)] = weights.astype(w.shape.dtype)


def _values(w: Walk, item: Item, part: int) -> None:
    j, step, head, _ = item
    buffers, rows, at = w.buffers, w.rows(part), w.slot_of(item)
    added = dot_values(buffers["weights"][w.pair(part)], buffers["values"][j % 4, step, head])
    kept = repeat_lanes(buffers["kept"][w.pair(part)], w.shape.lanes)
    buffers["sums"][at, rows] = buffers["sums"][at, rows] * kept + added
