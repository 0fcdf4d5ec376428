"""Columns of the TPU's decode kernel: (token, head) pairs of an item, how they are loaded, scaled and numbered."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import LANES, DecodeShape


def tokens_of(columns: tuple[int, int], first: int, shape: DecodeShape) -> jax.Array:
    """The token of an item in each column, counted from `first`."""
    periods, begin = divmod(first, shape.period)  # what lanes hold is then computed once, not for each of the columns
    lanes = jax.lax.broadcasted_iota(jnp.int32, columns, 1)
    return jax.lax.div(begin + lanes, shape.words) + periods * (shape.period // shape.words)


def column_scales(tile: Any, part: int, column: int, shape: DecodeShape) -> tuple[jax.Array, jax.Array]:
    """Scales of K and of V, [1, 128] each, of a part's columns column .. column + 127. tile: [2K, tokens]."""
    first, last = column // shape.words, (column + LANES - 1) // shape.words
    begin = first // LANES * LANES if last // LANES == first // LANES else first
    scales = tile[:, begin : begin + LANES]
    rows, lanes = (jax.lax.broadcasted_iota(jnp.int32, scales.shape, axis) for axis in (0, 1))
    if shape.words > 1:
        tokens = tokens_of(scales.shape, column, shape) - begin
        scales = jnp.take_along_axis(scales, tokens, axis=1, mode="promise_in_bounds")
    own = 2 * (jax.lax.rem(column % shape.period + lanes, shape.words) * shape.parts + part)
    keys, values = (jnp.sum(jnp.where(rows == own + i, scales, 0.0), axis=0, keepdims=True) for i in (0, 1))
    return keys, values


def number_columns(columns: Any, shape: DecodeShape) -> None:
    """Fills Scratch.columns."""
    N, width = columns.shape[1:]
    column = jax.lax.broadcasted_iota(jnp.int32, (N, width), 1)
    head = jax.lax.broadcasted_iota(jnp.int32, (N, width), 0) // shape.group
    for part in range(shape.parts):
        is_own = jax.lax.rem(column, shape.words) * shape.parts + part == head
        columns[part] = jnp.where(is_own, column // shape.words, jnp.int32(2**30))


def words_of(tiles: Any, shape: DecodeShape) -> Any:
    """The buffers as rows of 32-bit words: [buffers, tokens * words, Hp]."""
    buffers, tokens, _, lanes = tiles.shape
    if shape.itemsize < 4:
        tiles = tiles.bitcast(jnp.uint32)
    return tiles.reshape(buffers, tokens * tiles.shape[2], lanes)


def load_vectors(
    tiles: Any,
    words: Any,
    buffer: Any,
    token: int,
    width: int,
    shape: DecodeShape,
    vector: int,
    *,
    widens_words: bool,
) -> jax.Array:
    """Vectors vector, vector + V, ... of chunk's tokens, V of them a word (two with 32 bits: K, V): [width, Hp].

    They have the pool's dtype, or with widens_words float32 in place of int8. The interpreter has no views of
    references: there a value is cast instead.
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
    if widens_words and shape.pool_dtype == jnp.int8:
        signed = (pltpu.bitcast(rows, jnp.int32) << (32 - (vector + 1) * bits)) >> (32 - bits)
        return signed.astype(jnp.float32)
    rows = rows >> (vector * bits) if vector else rows
    return pltpu.bitcast(rows.astype(jnp.dtype(f"uint{bits}")), shape.pool_dtype)
