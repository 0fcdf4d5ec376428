"""KV tiles of the TPU's prefill kernel: their blocks fetched a tile ahead, K and V of each head taken apart."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.prefill.config import LANES, PIECE
from pallas_kernels.paged_attention.tpu.prefill.math import halves
from pallas_kernels.paged_attention.tpu.prefill.schedule import Tile
from pallas_kernels.paged_attention.tpu.prefill.walk import Walk
from pallas_kernels.table_lines import LINE, num_lines

_STARTS = 4  # transfers whose starts are written side by side, so that one's scalars hide another's latency


def enter(w: Walk, t, tile: Tile, j) -> None:
    """KV tile j of query tile t lies in `keys` and `values`; the blocks of the next one are on their way."""
    _arrive(w, tile, j)
    first, end = w.steps_of(tile, j)

    @pl.loop(first, end)
    def _(step):
        _take_apart(w, tile, j, step)

    @pl.when(j + 1 < tile.end_kv)
    def _():
        fetch_blocks(w, t, tile, j + 1)

    @pl.when((j + 1 == tile.end_kv) & (t + 1 < w.num_tiles))
    def _():
        following = Tile.read(w.tiles, t + 1)
        fetch_blocks(w, t + 1, following, following.first_kv)


def fetch_blocks(w: Walk, t, tile: Tile, j) -> None:
    """Starts the transfers of KV tile j's blocks, and of the lines of the block table that name the next one's."""
    turn = w.turn[0]
    w.turn[0] = turn + 1

    @pl.when(turn > 0)
    def _():
        for line in _lines(w, tile, j, turn):
            line.wait()

    @pl.when(j + 1 < tile.end_kv)
    def _():
        for line in _lines(w, tile, j + 1, turn + 1):
            line.start()

    @pl.when((j + 1 == tile.end_kv) & (t + 1 < w.num_tiles))
    def _():
        following = Tile.read(w.tiles, t + 1)
        for line in _lines(w, following, following.first_kv, turn + 1):
            line.start()

    first, end = _blocks_of(w, tile, j)
    base = (turn & 1) * (num_lines(w.blocks) * LINE) + (j * w.blocks & (LINE - 1))

    def start(place) -> None:
        id = w.lines[base + place]
        block = w.pool.at[id if w.shape.is_dense else pl.ds(id, 1)]
        pltpu.make_async_copy(block, _places(w, place, 1), w.semaphores["blocks"]).start()
        if w.scales is not None:
            into = w.buffers["block_scales"].at[pl.ds(place, 1)]
            pltpu.make_async_copy(w.scales.at[pl.ds(id, 1)], into, w.semaphores["blocks"]).start()

    @pl.loop(0, (end - first) // _STARTS)
    def _(group):
        for i in range(_STARTS):
            start(first + group * _STARTS + i)

    pl.loop(first + (end - first) // _STARTS * _STARTS, end)(start)


def _lines(w: Walk, tile: Tile, j, turn) -> list[Any]:
    """The transfers of the lines that name KV tile j's blocks, to where they are in this turn."""
    many = num_lines(w.blocks)
    there, here = tile.row * w.row_lines + j * w.blocks // LINE, (turn & 1) * many
    return [
        pltpu.make_async_copy(w.tables.at[there + i], w.lines.at[pl.ds((here + i) * LINE, LINE)], w.semaphores["lines"])
        for i in range(many)
    ]


def _arrive(w: Walk, tile: Tile, j) -> None:
    """Waits for all of them at once."""
    first, end = _blocks_of(w, tile, j)
    places = [_places(w, 0, end - first)]
    if w.scales is not None:
        places.append(w.buffers["block_scales"].at[pl.ds(0, end - first)])
    for fetched in places:
        pltpu.make_async_copy(fetched, fetched, w.semaphores["blocks"]).wait()


def _blocks_of(w: Walk, tile: Tile, j) -> tuple[Any, Any]:
    """Blocks first .. end - 1 of KV tile j hold what the query tile may see."""
    C, in_tile = w.shape.block_size, w.blocks
    first = jnp.maximum(w.oldest(tile) // C - j * in_tile, 0)
    return first, jnp.minimum(pl.cdiv(tile.end_position, C) - j * in_tile, in_tile)


def _places(w: Walk, first, count) -> Any:
    """Where `count` blocks of a KV tile lie, from `first` on."""
    if not w.shape.is_dense:
        return w.buffers["blocks"].at[pl.ds(first, count)]
    rows = w.shape.block_size * w.shape.vectors
    return w.buffers["blocks"].at[pl.ds(pl.multiple_of(first * rows, rows), count * rows)]


def _take_apart(w: Walk, tile: Tile, j, step) -> None:
    """K and V of each head of a step, from blocks in which they alternate; what no query sees of V is zero."""
    size = w.config.step_kv
    start, oldest = j * w.config.tile_kv + step * size, w.oldest(tile)

    @pl.loop(0, size // PIECE)
    def _(piece):
        _load_words(w, step * size + piece * PIECE)
        rows = pl.ds(pl.multiple_of(piece * PIECE, PIECE), PIECE)
        for head, (k, v) in enumerate(_heads_of_words(w)):
            w.buffers["keys"][j & 1, step, head, rows, :] = k
            w.buffers["values"][j & 3, step, head, rows, :] = v

    @pl.when((start + size > tile.end_position) | (start < oldest))
    def _():
        @pl.loop(0, w.shape.num_kv_heads)
        def _(head):
            v = w.buffers["values"].at[j & 3, step, head]
            position = start + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
            v[...] = jnp.where((position >= oldest) & (position < tile.end_position), v[...], 0)

    if w.scales is not None:
        _join_scales(w, j, step, oldest, tile.end_position)


def _load_words(w: Walk, token) -> None:
    """PIECE tokens' vectors as 32-bit words, whose rows can be loaded with a stride."""
    blocks, words, C, Vn = w.buffers["blocks"], w.buffers["words"], w.shape.block_size, w.shape.vectors
    if w.shape.is_dense:
        vectors = blocks[pl.ds(pl.multiple_of(token * Vn, PIECE), PIECE * Vn), :]
    elif C > PIECE:
        vectors = blocks[token // C, pl.ds(token % C, PIECE)].reshape(PIECE * Vn, w.shape.lanes)
    else:
        vectors = blocks[pl.ds(token // C, PIECE // C)].reshape(PIECE * Vn, w.shape.lanes)
    for i in range(words.shape[0]):
        lanes = vectors[:, i * LANES : (i + 1) * LANES]
        if w.shape.has_pairs:
            words[i] = pltpu.bitcast(lanes.astype(jnp.bfloat16), jnp.uint32)
        else:
            words[i] = lanes.astype(jnp.float32)


def _heads_of_words(w: Walk):
    """Yields K and V of each head, [PIECE, their lanes]."""
    dtype, Vn, is_packed = w.shape.dtype, w.shape.vectors, w.shape.is_packed
    if w.shape.has_pairs:
        for pair in range(Vn // 2):
            both = halves(_strided_words(w, pair, Vn // 2), dtype)
            yield from map(functools.partial(_parted, w), both) if is_packed else (both,)
    else:
        vectors = [_strided_words(w, i, Vn).astype(dtype) for i in range(Vn)]
        yield from (
            map(functools.partial(_parted, w), vectors) if is_packed else zip(*[iter(vectors)] * 2, strict=True)
        )


def _parted(w: Walk, vector: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V of a packed vector, [PIECE, lanes]; each is all of it where a column of lanes has both."""
    return vector[:, : w.shape.key_lanes], vector[:, w.shape.lanes - w.shape.value_lanes :]


def _strided_words(w: Walk, first: int, stride: int) -> jax.Array:  # [PIECE, lanes]
    words = w.buffers["words"]
    parts = [words[i, pl.Slice(first, PIECE, stride), :] for i in range(words.shape[0])]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _join_scales(w: Walk, j, step, oldest, end_position) -> None:
    """Scales of a step with its tokens side by side, zero for what no query sees."""
    C, size, K = w.shape.block_size, w.config.step_kv, w.shape.num_kv_heads
    for i in range(size // C):
        scales = w.buffers["block_scales"][step * (size // C) + i]  # [2K, C]
        position = j * w.config.tile_kv + step * size + i * C + jax.lax.broadcasted_iota(jnp.int32, (1, C), 1)
        scales = jnp.where((position >= oldest) & (position < end_position), scales, 0.0)
        for head in range(K):
            w.buffers["scales"][j & 1, step, head, :, i * C : (i + 1) * C] = scales[2 * head : 2 * head + 2]
