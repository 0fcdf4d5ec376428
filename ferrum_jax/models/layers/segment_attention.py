"""Attention that looks both ways, within segments: several images lie one after the other in one array.

    segments  1 1 1 2 | 2 2 3 3 | 3 . . . | . . . .      in tiles of 4; "." is padding, segment 0, behind all others

Tiles without a real patch are not computed, and a tile of queries meets the tiles of keys that have its segments alone.
So work follows what is there, whatever the size of the array, and the bits of the only image of an array follow from
its patches and the size of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ferrum_jax.io.ints import ceil_div, round_up

QUERY_TILE = 256  # tokens of an array's tiles at least, unless it has fewer
_MAX_TILES = 16  # so that weights, which each tile reads, are not read more often
_MASKED = -1e30  # finite: a tile may have no key for a query, and the softmax so far must not be NaN


def tile_of(num_tokens: int, multiple: int = 1) -> int:
    """Tokens of a tile of an array that has so many: 256 of an array up to 4,096. multiple: of what, rounded up."""
    return round_up(min(num_tokens, max(QUERY_TILE, ceil_div(num_tokens, _MAX_TILES))), multiple)


def in_tiles(x: jax.Array, tile: int) -> jax.Array:  # [T, ...] -> [tiles, tile, ...], zeros behind
    return jnp.pad(x, ((0, -len(x) % tile), *[(0, 0)] * (x.ndim - 1))).reshape(-1, tile, *x.shape[1:])


def num_real_tiles(segments: jax.Array) -> jax.Array:  # [tiles, t] int32 -> int32
    """The tiles that have a real token; they come first."""
    return jnp.sum(jnp.any(segments > 0, axis=1), dtype=jnp.int32)


def map_tiles(fn: Callable[..., Any], num_tiles: jax.Array, *arrays: Any) -> Any:  # of [tiles, ...] each, or trees
    """fn of the first tiles of arrays, stacked as they were; of all tiles behind, zeros."""
    count = len(jax.tree.leaves(arrays)[0])
    if count == 1:
        return jax.tree.map(lambda x: x[None], fn(*jax.tree.map(lambda x: x[0], arrays)))

    def tile(i: jax.Array) -> Any:
        return fn(*jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), arrays))

    def put(i: jax.Array, found: Any) -> Any:
        return jax.tree.map(lambda all_of, x: jax.lax.dynamic_update_index_in_dim(all_of, x, i, 0), found, tile(i))

    shapes = jax.eval_shape(tile, num_tiles)
    return jax.lax.fori_loop(0, num_tiles, put, jax.tree.map(lambda s: jnp.zeros((count, *s.shape), s.dtype), shapes))


def attention_of_tiles(
    q: jax.Array,  # [tiles, N, t, H]
    k: jax.Array,  # [tiles, N, t, H]
    v: jax.Array,  # [tiles, N, t, H]
    segments: jax.Array,  # [tiles, t] int32, ascending, and 0 behind
    *,
    scale: float | None = None,
) -> jax.Array:  # [tiles, t, N, H], q's dtype
    """softmax(scale q kᵀ) v over the tokens of the same segment; softmax in float32. scale: 1 / sqrt(H) if None.

    What padding gets means nothing, and is finite where the padding of its tile is.
    """
    times = q.shape[-1] ** -0.5 if scale is None else scale
    firsts, lasts = segments[:, 0], jnp.max(segments, axis=1)

    def of_tile(q: jax.Array, own: jax.Array) -> jax.Array:  # [N, t, H], [t] -> [t, N, H]
        met = (firsts > 0) & (lasts >= own[0]) & (firsts <= jnp.max(own))
        start = jnp.argmax(met)
        step = functools.partial(_add_keys, q, own, times)
        ends = jax.lax.fori_loop(
            start, start + jnp.sum(met), lambda j, so_far: step(k[j], v[j], segments[j], so_far), _nothing_seen(q)
        )
        return jnp.swapaxes(ends[2] / ends[1], 0, 1).astype(q.dtype)

    return map_tiles(of_tile, num_real_tiles(segments), q, segments)


_SoFar = tuple[jax.Array, jax.Array, jax.Array]  # largest score [N, t, 1], sum of weights [N, t, 1], values [N, t, H]


def _nothing_seen(q: jax.Array) -> _SoFar:
    of_queries = (*q.shape[:2], 1)
    return jnp.full(of_queries, _MASKED), jnp.zeros(of_queries), jnp.zeros(q.shape)


def _add_keys(
    q: jax.Array,  # [N, t, H]
    own: jax.Array,  # [t]
    scale: float,
    k: jax.Array,  # [N, s, H]
    v: jax.Array,  # [N, s, H]
    segments: jax.Array,  # [s]
    so_far: _SoFar,
) -> _SoFar:
    """The softmax over some keys more. What queries summed of masked keys alone is scaled by 0 at the first real one.

    Source: Milakov & Gimelshein 2018 (online softmax), algorithm 3.
    """
    largest, total, values = so_far
    scores = jnp.einsum("nth,nsh->nts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where((own[:, None] == segments[None, :])[None], scores, _MASKED)
    most = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
    weights, kept = jnp.exp(scores - most), jnp.exp(largest - most)
    found = jnp.einsum("nts,nsh->nth", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return most, total * kept + jnp.sum(weights, axis=-1, keepdims=True), values * kept + found


def segment_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, N, H]
    v: jax.Array,  # [T, N, H]
    segments: jax.Array,  # [T] int32, ascending, and 0 behind
    *,
    scale: float | None = None,
) -> jax.Array:  # [T, N, H], q's dtype
    """`attention_of_tiles` of an array that is not in tiles."""
    tile = tile_of(len(q))
    heads_first = [jnp.swapaxes(in_tiles(x, tile), 1, 2) for x in (q, k, v)]
    found = attention_of_tiles(heads_first[0], heads_first[1], heads_first[2], in_tiles(segments, tile), scale=scale)
    return found.reshape(-1, *q.shape[1:])[: len(q)]
