"""Attention that looks both ways, within segments: several images lie one after the other in one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp

QUERY_TILE = 256  # so that the scores of all queries never exist at once


def segment_attention(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, N, H]
    v: jax.Array,  # [T, N, H]
    segments: jax.Array,  # [T] int32
    *,
    scale: float | None = None,
) -> jax.Array:  # [T, N, H], q's dtype
    """softmax(scale q kᵀ) v over the tokens of the same segment; softmax in float32. scale: 1 / sqrt(H) if None."""
    T, N, H = q.shape
    times = H**-0.5 if scale is None else scale

    def one_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        q, own = tile  # [t, N, H], [t]
        scores = jnp.einsum("tnh,snh->nts", q, k, preferred_element_type=jnp.float32) * times
        scores = jnp.where((own[:, None] == segments[None, :])[None], scores, -jnp.inf)  # its own token at least
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("nts,snh->tnh", weights, v)

    if T <= QUERY_TILE:
        return one_tile((q, segments))
    more = -T % QUERY_TILE  # queries that repeat the last one
    padded = (jnp.pad(q, ((0, more), (0, 0), (0, 0)), mode="edge"), jnp.pad(segments, (0, more), mode="edge"))
    tiles = (padded[0].reshape(-1, QUERY_TILE, N, H), padded[1].reshape(-1, QUERY_TILE))
    return jax.lax.map(one_tile, tiles).reshape(-1, N, H)[:T]
