"""RMSNorm in the two forms that models use, and LayerNorm, with float32 statistics whatever the dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.spec import ModelSpec


class RMSNorm(nnx.Module):
    """y = weight * (x / sqrt(mean(x²) + eps)) over the last axis; the quotient is rounded to x's dtype first.

    zero_centred: y = (1 + weight) * quotient, all in float32, rounded once. Source: Zhang & Sennrich 2019,
    equation 4; rounding as in the reference implementations of Llama and of Gemma.
    """

    def __init__(self, size: int, *, eps: float, zero_centred: bool = False, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype) if zero_centred else jnp.ones((size,), dtype))
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> the same
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        if self.zero_centred:
            return (wide * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        return weight * (wide * scale).astype(x.dtype)


def norm_of(spec: ModelSpec, size: int, *, dtype: jnp.dtype) -> RMSNorm:
    """A norm as all of this model are."""
    return RMSNorm(size, eps=spec.rms_norm_eps, zero_centred=spec.zero_centred_norms, dtype=dtype)


class LayerNorm(nnx.Module):
    """y = weight * (x - mean) / sqrt(variance + eps) + bias over the last axis; rounded to x's dtype at the end.

    Source: Ba et al. 2016, section 3.1, with the variance of the population.
    """

    def __init__(self, size: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> the same
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        leading = range(x.ndim - 1)
        weight, bias = (jnp.expand_dims(a[...], leading).astype(jnp.float32) for a in (self.weight, self.bias))
        return (wide * scale * weight + bias).astype(x.dtype)
