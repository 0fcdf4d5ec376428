"""Attention to keys that an indexer chose, in plain XLA: each query reads its own, and nothing else.

One query's keys are gathered piece by piece, in the order of their positions, and merged by an online softmax in
float32 as whole tiles are (`xla.py`). Where a tile's queries see no more keys than are chosen, they attend to all of
them, which reads K and V once for all queries; not where each token's bits must be the same in every step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.chosen_keys import HIDDEN, MAX_PIECE
from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.logits import Logits

_PIECE_KEYS = 2048  # that a tile's queries read at once: with 576 values of float32, 4.7 MB


def attend_to_chosen(
    queries: jax.Array,  # [Q, N, H] float32, scaled
    places: jax.Array,  # [Q, S, at least top_k] int32, S 1 or K
    most: jax.Array,  # [] int32, keys that one of the queries has at most
    pool: KVPool,  # with the step's K and V
    logits: Logits,
) -> jax.Array:  # [Q, N, V] float32
    """Attention of a tile's queries, each to its own keys. KV heads with keys of their own are queries of their own."""
    T, N, H = queries.shape
    S, G = places.shape[1], N // pool.num_kv_heads
    Q, K = T * S, pool.num_kv_heads // S
    piece = max(MAX_PIECE // 8, min(MAX_PIECE, _PIECE_KEYS // Q))
    heads, places = queries.reshape(Q, K, G, H), places.reshape(Q, -1)

    def one_piece(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, acc = state  # [Q, K, G], [Q, K, G], [Q, K, G, V]
        at = jax.lax.dynamic_slice_in_dim(places, j * piece, piece, axis=1)
        there = (at > 0)[:, None, None]  # [Q, 1, 1, S]
        k, v = _gather(pool, at, S)
        scores = jnp.einsum("qkgh,qskh->qkgs", heads, k)
        if logits.soft_cap is not None:
            scores = logits.soft_cap * jnp.tanh(scores / logits.soft_cap)
        scores = jnp.where(there, scores, HIDDEN)
        raised = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.where(there, jnp.exp(scores - raised[..., None]), 0.0)
        kept = jnp.exp(highest - raised)
        acc = acc * kept[..., None] + jnp.einsum("qkgs,qskv->qkgv", weights, v)
        return raised, total * kept + jnp.sum(weights, axis=-1), acc

    shape = (Q, K, G)
    empty = (jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros((*shape, pool.value_dim)))
    highest, total, acc = jax.lax.fori_loop(0, -(-most // piece), one_piece, empty)
    if logits.sinks is not None:  # a sink is one more logit per head, without a value
        sink = jnp.tile(logits.sinks.astype(jnp.float32).reshape(S, K, G), (T, 1, 1))
        raised = jnp.maximum(highest, sink)
        kept = jnp.exp(highest - raised)
        total, acc = total * kept + jnp.exp(sink - raised), acc * kept[..., None]
    return (acc / jnp.where(total > 0, total, 1.0)[..., None]).reshape(T, N, -1)


def _gather(pool: KVPool, at: jax.Array, num_parts: int) -> tuple[jax.Array, jax.Array]:  # [Q, n, K, H or V] float32
    """K and V of the tokens at these places [Q, n]; values of the null block are zero, for they may be NaN.

    num_parts: query i has the i-th part of the heads, and begins anew after the last.
    """
    P, C, vectors, lanes = pool.values.shape

    def own(count: int) -> jax.Array:  # [Q, 1, count / num_parts]
        return jnp.tile(jnp.arange(count).reshape(num_parts, 1, -1), (len(at) // num_parts, 1, 1))

    flat = pool.values.reshape(P * C, vectors, lanes)
    found = flat[at] if num_parts == 1 else flat[at[..., None], own(vectors)]
    found = from_bits(found, pool).astype(jnp.float32)
    if pool.is_packed:
        k, v = jnp.split(found, [pool.head_dim], axis=-1)
    else:
        k, v = found[:, :, 0::2], found[:, :, 1::2]
    if pool.scales is not None:
        places = at[..., None]
        scales = pool.scales[places // C, own(pool.scales.shape[1]), places % C][..., None]  # [Q, n, 2K, 1]
        k, v = k * scales[:, :, 0::2], v * scales[:, :, 1::2]
    if pool.is_latent:
        k, v = jnp.concatenate([k, v], axis=-1), k
    return k, jnp.where((at > 0)[..., None, None], v, 0.0)
