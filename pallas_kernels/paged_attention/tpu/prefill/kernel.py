"""Attention of rows with several queries (prefill chunks, encoders) for the TPU, in Mosaic.

One launch walks the query tiles of the step. For a query tile it walks the KV tiles that hold what the tile may see;
their blocks come by DMA, one KV tile ahead, and the piece of the block
table that names them another one ahead, across query tiles too. The keys of a KV tile are cut into steps and the
query tile into chunks: an *item* is (KV tile, step, KV head, chunk), and its queries are cut into parts, which
`stages.py` takes through three stages. A *stretch* is straight code over the parts of one or more items: its
beginning and its end are paid once. Which one comes next depends on who is hidden from whom.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.tpu.prefill.config import ALIGNMENT, LANES, PrefillShape
from pallas_kernels.paged_attention.tpu.prefill.kv_tiles import enter, fetch_blocks
from pallas_kernels.paged_attention.tpu.prefill.query_tiles import finish, start_q, start_sums, wait_out, wait_q
from pallas_kernels.paged_attention.tpu.prefill.schedule import PrefillSchedule, Tile
from pallas_kernels.paged_attention.tpu.prefill.stages import begin, end, run_stretch
from pallas_kernels.paged_attention.tpu.prefill.stretch import Stretch
from pallas_kernels.paged_attention.tpu.prefill.walk import Item, Walk

_LOG2_E = 1.4426950408889634


def prefill_attention(
    q: jax.Array,  # [T, N, H]
    pool: KVPool,  # the step's own K and V are in it
    schedule: PrefillSchedule,
    logits: Logits,
    *,
    interpret: Any = False,
) -> jax.Array:  # [T, N, V], the dtype of q; tokens of no query tile hold anything, NaN too
    """softmax(scale * q k^T + mask) v of the tokens of the schedule's query tiles, accumulated in float32."""
    T, N, H = q.shape
    values, scales, soft_cap, sinks = pool.values, pool.scales, logits.soft_cap, logits.sinks
    config, shape = schedule.config, PrefillShape.of(num_heads=N, dtype=q.dtype, pool=pool)
    config.check(shape)
    factor = logits.scale * _LOG2_E if soft_cap is None else logits.scale / soft_cap
    has_ends = schedule.ends is not None
    buffers = config.buffers(shape, has_ends=has_ends)
    heads = _heads_first(q, factor, config.tile_q, shape.key_lanes)
    arguments = [schedule.tables, heads, values.reshape(len(values), -1, shape.lanes) if shape.is_dense else values]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    arguments += [operand for operand in (scales, schedule.ends) if operand is not None]
    specs = [anywhere] * len(arguments)
    if sinks is not None:
        lanes = (len(sinks), 1, LANES)
        arguments.append(jnp.broadcast_to(sinks.astype(jnp.float32)[:, None, None] * _LOG2_E, lanes))
        specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            shape=shape,
            config=config,
            row_lines=schedule.row_lines,
            window=schedule.step.window,
            chunked=schedule.step.chunked,
            causal=schedule.step.causal,
            cap=None if soft_cap is None else soft_cap * _LOG2_E,
            has_scales=scales is not None,
            has_ends=has_ends,
            has_sinks=sinks is not None,
        ),
        out_shape=jax.ShapeDtypeStruct(heads.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=specs,
            out_specs=anywhere,
            scratch_shapes=[
                {name: pltpu.VMEM(size, jnp.dtype(dtype)) for name, (size, dtype) in buffers.items()},
                {name: pltpu.SemaphoreType.DMA(()) for name in ("q", "lines", "blocks", "out")},
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=config.vmem_bytes(shape, has_ends=has_ends) * 5 // 4 + 2**21, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="prefill_attention",
    )(schedule.num_tiles, schedule.tiles, schedule.lines, *arguments)
    first = H if shape.is_packed and pool.v_head_dim == H else 0  # such values are in the second half of their vector
    return out[:, :T, first : first + pool.v_head_dim].transpose(1, 0, 2)


def _heads_first(q: jax.Array, factor: float, tile_q: int, lanes: int) -> jax.Array:  # -> [N, tokens, lanes]
    """q times factor, with tokens next to lanes as the kernel's matrix products want them."""
    T, _, H = q.shape
    tokens = -(-max(T, tile_q) // ALIGNMENT) * ALIGNMENT
    heads = (q.astype(jnp.float32) * factor).astype(q.dtype).transpose(1, 0, 2)
    return jnp.pad(heads, ((0, 0), (0, tokens - T), (0, lanes - H)))


def _kernel(*refs, has_scales: bool, has_ends: bool, has_sinks: bool, **static: Any) -> None:
    num_tiles, tiles, lines, tables, q, pool, *rest = refs  # see Walk
    scales = rest.pop(0) if has_scales else None
    ends = rest.pop(0) if has_ends else None
    sinks = rest.pop(0) if has_sinks else None
    out, buffers, semaphores, turn = rest
    walk = Walk(
        num_tiles=num_tiles[0],
        tiles=tiles,
        lines=lines,
        tables=tables,
        turn=turn,
        q=q,
        pool=pool,
        scales=scales,
        ends=ends,
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
        start_q(w, 0)
        w.turn[0] = 0
        fetch_blocks(w, 0, first, first.first_kv)
        w.buffers["border"][...] = jnp.zeros_like(w.buffers["border"])
        jax.lax.fori_loop(0, w.num_tiles, functools.partial(_run_tile, w), None)
        wait_out(w, w.num_tiles - 1)


def _run_tile(w: Walk, t, _) -> None:
    """All of one query tile: the pipeline over its items."""
    tile = Tile.read(w.tiles, t)
    start_sums(w, tile)
    wait_q(w, t)

    @pl.when(t > 0)
    def _():
        wait_out(w, t - 1)

    @pl.when(t + 1 < w.num_tiles)
    def _():
        start_q(w, t + 1)

    enter(w, t, tile, tile.first_kv)
    first = w.first_of(tile, tile.first_kv)
    begin(w, t, tile, first)
    last = jax.lax.fori_loop(tile.first_kv, tile.end_kv, lambda j, before: _run_kv_tile(w, t, tile, j, before), first)
    end(w, last)
    finish(w, t, tile)


def _run_kv_tile(w: Walk, t, tile: Tile, j, before: Item) -> Item:
    """Runs the items of one KV tile and returns the last. before: the item before the first."""
    first_step, end_step = w.steps_of(tile, j)

    def one_step(step, before):
        return _run_step(w, t, tile, j, step, step + 1 == end_step, before)

    return jax.lax.fori_loop(first_step, end_step, one_step, before)


def _run_step(w: Walk, t, tile: Tile, j, step, is_last, before: Item) -> Item:
    """The items of one step, stretch by stretch."""
    first_chunk, end_chunk = w.chunks_of(tile, j, step)
    count = w.shape.num_kv_heads * (end_chunk - first_chunk)
    next_tile = w.first_of(tile, jnp.minimum(j + 1, tile.end_kv - 1))
    following = _select([(is_last, next_tile), (True, w.first_in(tile, j, step + 1))])
    kinds = w.kinds(tile, j, step)

    def one_stretch(state):
        done, *items = state  # the item before, the next one
        while len(items) < max(stretch.items for _, stretch in kinds) + 2:
            items.append(w.advance(items[-1], first_chunk, end_chunk))
        chosen = _first_that_fits(kinds, count - done)
        done += _select([(is_chosen, jnp.int32(s.items)) for is_chosen, s in chosen])

        @pl.when((done == count) & is_last & (j + 1 < tile.end_kv))
        def _():
            enter(w, t, tile, j + 1)

        for is_chosen, stretch in chosen:
            after = _select([(done == count, following), (True, items[stretch.items + 1])])
            run = functools.partial(run_stretch, w, t, tile, stretch, [*items[: stretch.items + 1], after])
            pl.when(is_chosen)(run)
        return done, *(_select([(is_chosen, items[s.items + i]) for is_chosen, s in chosen]) for i in (0, 1))

    first = (jnp.int32(0), before, w.first_in(tile, j, step))
    return jax.lax.while_loop(lambda state: state[0] < count, one_stretch, first)[1]


def _first_that_fits(kinds: list[tuple[Any, Stretch]], left) -> list[tuple[Any, Stretch]]:
    """Each kind of stretch that a step may have, and whether it is next with this many items left; one is."""
    taken, chosen = jnp.bool_(False), []
    for may_be, stretch in kinds:
        fits = may_be & (left >= stretch.items)
        chosen.append((fits & ~taken, stretch))
        taken |= fits
    return chosen


def _select(values: list[tuple[Any, Any]]) -> Any:
    """The value, a tree of scalars, of the first predicate that is true; the last one is where no other is."""
    *others, (_, found) = values
    for is_chosen, value in reversed(others):
        found = jax.tree.map(functools.partial(jnp.where, is_chosen), value, found)
    return found
