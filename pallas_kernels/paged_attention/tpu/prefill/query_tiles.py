"""Query tiles of the TPU's prefill kernel: their queries, empty sums, and results."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.prefill.config import ALIGNMENT, LANES
from pallas_kernels.paged_attention.tpu.prefill.math import HIDDEN, repeat_lanes
from pallas_kernels.paged_attention.tpu.prefill.schedule import Tile
from pallas_kernels.paged_attention.tpu.prefill.walk import Walk


def start_sums(w: Walk, tile: Tile) -> None:
    """Empty sums; a sink is a logit that has been seen and has no value."""

    def one_chunk(head, chunk) -> None:
        at = head * w.config.chunks + chunk
        for name in ("highest", "total", "sums"):
            buffer = w.buffers[name]
            buffer[at] = jnp.full(buffer.shape[1:], HIDDEN if name == "highest" else 0.0, jnp.float32)
        if w.sinks is not None:
            size = (w.shape.group, w.config.part_q, LANES)
            sinks = jnp.broadcast_to(w.sinks[pl.ds(head * size[0], size[0])], size).reshape(-1, LANES)
            for part in range(w.config.parts):
                w.buffers["highest"][at, w.rows(part)] = sinks
            one = 1.0 if w.config.sums_by_product else 1 / LANES  # its lanes are all alike, or to be added
            w.buffers["total"][at] = jnp.full(w.buffers["total"].shape[1:], one, jnp.float32)

    _for_chunks(w, tile, one_chunk)


def start_q(w: Walk, t) -> None:
    """Starts the transfers of query tile t."""
    for copy in _copies(w, t):
        copy.start()


def wait_q(w: Walk, t) -> None:
    """Waits for them."""
    for copy in _copies(w, t):
        copy.wait()


def _copies(w: Walk, t) -> list[Any]:
    """The transfers of query tile t, and of what its tokens see behind themselves."""
    tokens = pl.ds(pl.multiple_of(Tile.read(w.tiles, t).first_token, ALIGNMENT), w.config.tile_q)
    sources = {"q": w.q.at[:, tokens, :]} | ({} if w.ends is None else {"ends": w.ends.at[tokens, :]})
    return [
        pltpu.make_async_copy(source, w.buffers[name].at[t & 1], w.semaphores["q"]) for name, source in sources.items()
    ]


def finish(w: Walk, t, tile: Tile) -> None:
    """Writes the results of the tile's row, in whole groups of ALIGNMENT tokens.

    They overwrite the tile's queries in the buffer. A group that an earlier tile wrote keeps that tile's
    tokens, which are those before the row's first.
    """
    out, G = w.buffers["q"].at[t & 1], w.shape.group

    def one_chunk(head, chunk) -> None:
        at = head * w.config.chunks + chunk
        for part in range(w.config.parts):
            rows = w.rows(part)
            total = w.buffers["total"][at, rows]
            if w.config.sums_by_product:
                total = repeat_lanes(total, w.shape.value_lanes)
            else:
                total = jnp.sum(total, axis=1, keepdims=True)
            result = w.buffers["sums"][at, rows] / jnp.where(total > 0, total, 1.0)
            result = result.astype(out.dtype).reshape(G, w.config.part_q, w.shape.value_lanes)
            out[pl.ds(head * G, G), w.tokens(chunk, part), pl.ds(0, w.shape.value_lanes)] = result

    _for_chunks(w, tile, one_chunk)
    border = w.buffers["border"]
    group = w.group(tile.first_lane // ALIGNMENT)
    lane = jax.lax.broadcasted_iota(jnp.int32, border.shape, 1)
    out[:, group, :] = jnp.where(lane < tile.first_lane % ALIGNMENT, border[...], out[:, group, :])
    border[...] = out[:, w.group((tile.end_lane - 1) // ALIGNMENT), :]
    _for_groups(w, t, tile, lambda copy: copy.start())


def wait_out(w: Walk, t) -> None:
    """Waits until the results of query tile t are written."""
    _for_groups(w, t, Tile.read(w.tiles, t), lambda copy: copy.wait())


def _for_chunks(w: Walk, tile: Tile, run) -> None:
    first, end = tile.first_lane // w.config.chunk_q, pl.cdiv(tile.end_lane, w.config.chunk_q)

    @pl.loop(0, w.shape.num_kv_heads)
    def _(head):
        @pl.loop(first, end)
        def _(chunk):
            run(head, chunk)


def _for_groups(w: Walk, t, tile: Tile, run) -> None:
    @pl.loop(tile.first_lane // ALIGNMENT, pl.cdiv(tile.end_lane, ALIGNMENT))
    def _(group):
        there = pl.ds(pl.multiple_of(tile.first_token + group * ALIGNMENT, ALIGNMENT), ALIGNMENT)
        source = w.buffers["q"].at[t & 1, :, w.group(group), :]
        run(pltpu.make_async_copy(source, w.out.at[:, there, :], w.semaphores["out"]))
