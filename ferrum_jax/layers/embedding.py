"""Embedding: token ids to vectors, and back to logits where the table is tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.layers.linear import project, random_weight


class Embedding(nnx.Module):
    """weight [V, D]. Ids are checked on the host; an id outside the table would read its last row."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.weight = random_weight((vocab_size, hidden_size), dtype, rngs)

    def __call__(self, token_ids: jax.Array) -> jax.Array:  # [T] int32 -> [T, D]
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")

    def attend(self, hidden: jax.Array) -> jax.Array:  # [R, D] -> [R, V] float32
        """Logits of hidden against every row of the table."""
        return project(hidden, self.weight[...], out_dtype=jnp.float32)
