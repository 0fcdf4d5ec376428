"""Embedding: token ids to vectors, and back to logits where the table is tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.layers.linear import project, random_weight
from ferrum_jax.sharding import WHOLE, Shards


class Embedding(nnx.Module):
    """weight [V, D]. Ids are checked on the host; an id outside the table would read its last row.

    scale: vectors, not logits, are multiplied by it, after it is rounded to dtype. On a mesh each device has an equal
    share of the rows, consecutive ones.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, scale: float = 1.0, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ) -> None:
        self.weight = random_weight((vocab_size, hidden_size), dtype, rngs)
        self.scale = scale

    def __call__(self, token_ids: jax.Array, shards: Shards = WHOLE) -> jax.Array:  # [T] int32 -> [T, D]
        vectors = self._look_up(token_ids, shards)
        return vectors if self.scale == 1 else vectors * jnp.asarray(self.scale, vectors.dtype)

    def _look_up(self, token_ids: jax.Array, shards: Shards) -> jax.Array:
        if shards.size == 1:
            return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")
        rows = token_ids - shards.index() * self.weight.shape[0]
        here = (rows >= 0) & (rows < self.weight.shape[0])
        vectors = jnp.take(self.weight[...], rows, axis=0, mode="clip")
        return shards.sum(jnp.where(here[:, None], vectors, jnp.zeros_like(vectors)))

    def attend(self, hidden: jax.Array) -> jax.Array:  # [R, D] -> [R, V] float32
        """Logits of hidden against the rows of the table that this device has."""
        return project(hidden, self.weight[...], out_dtype=jnp.float32)
