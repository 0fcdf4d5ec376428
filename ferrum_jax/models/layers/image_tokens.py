"""ImageTokens: what a step's tokens of images have in place of embeddings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageTokens:
    """Embeddings of the tokens of a step that are of images, and what deepstack adds to the first layers' outputs.

    Source: Meng et al. 2024 (DeepStack).
    """

    are_here: jax.Array  # [T] bool
    embeddings: jax.Array  # [T, (1 + deepstack) * D], zeros where a token is of no image

    def in_place_of(self, x: jax.Array) -> jax.Array:  # [T, D] -> the same
        """Embeddings of a step's tokens, with those of images where tokens are of one."""
        return jnp.where(self.are_here[:, None], self._part(0, x), x)

    def added(self, x: jax.Array, layer: int) -> jax.Array | None:  # [T, D]
        """What deepstack adds to the output of a layer, as x is; None where it adds nothing."""
        is_there = (layer + 2) * x.shape[1] <= self.embeddings.shape[1]
        return self._part(1 + layer, x) if is_there else None

    def _part(self, index: int, x: jax.Array) -> jax.Array:
        D = x.shape[1]
        return self.embeddings[:, index * D : (index + 1) * D].astype(x.dtype)
