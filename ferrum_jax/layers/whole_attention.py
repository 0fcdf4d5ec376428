"""Attention of a whole array both ways: every token attends to every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def whole_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # [T, N, H] each -> [T, N, H], q's dtype
    """softmax(q kᵀ / sqrt(H)) v; softmax in float32.

    A head at a time: the scores of one are what a core's cache and a TPU's vector memory hold, and a product of two
    matrices keeps all cores busy, which one of many small matrices does not.
    """

    def of_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:  # [T, H] each -> [T, H]
        q, k, v = head
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * q.shape[1] ** -0.5
        weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        found = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (found / jnp.sum(weights, axis=1, keepdims=True)).astype(q.dtype)

    heads_first = [jnp.swapaxes(x, 0, 1) for x in (q, k, v)]
    return jnp.swapaxes(jax.lax.map(of_head, tuple(heads_first)), 0, 1)
