"""RMSNorm, with float32 statistics whatever the dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """y = weight * (x / sqrt(mean(x²) + eps)) over the last axis; the quotient is rounded to x's dtype first.

    Source: Zhang & Sennrich 2019, equation 4; rounding as in Llama's reference implementation.
    """

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> the same
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        return weight * (wide * scale).astype(x.dtype)
