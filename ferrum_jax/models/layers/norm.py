"""RMSNorm in the forms that models use, and LayerNorm, with float32 statistics whatever the dtype."""

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.sharding.shards import WHOLE, Shards
from ferrum_jax.models.spec import NormSpec


class RMSNorm(nnx.Module):
    """y = weight * (x / sqrt(mean(x²) + eps)) over the last axis; the quotient is rounded to x's dtype first.

    rounds_once: it is not; the product in float32 is. zero_centred: y = (1 + weight) * quotient, rounded once too.
    Source: Zhang & Sennrich 2019, equation 4; rounding as in the reference implementations of Llama and of Gemma.
    """

    def __init__(
        self, size: int, *, eps: float, zero_centred: bool = False, rounds_once: bool = False, dtype: jnp.dtype
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype) if zero_centred else jnp.ones((size,), dtype))
        self.eps = eps
        self.zero_centred, self.rounds_once = zero_centred, rounds_once

    def __call__(self, x: jax.Array, parts: Shards = WHOLE) -> jax.Array:  # [..., size] -> the same
        """parts: the devices that share the values equally; the mean is over all of them."""
        wide = x.astype(jnp.float32)
        mean = parts.sum(jnp.mean(wide * wide, axis=-1, keepdims=True)) / parts.size
        scale = jax.lax.rsqrt(mean + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1))
        if self.zero_centred:
            return (wide * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
        if self.rounds_once:
            return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
        return weight * (wide * scale).astype(x.dtype)


class GatedNorm(RMSNorm):
    """z = y * sigmoid(W_up silu(W_down y)) of an RMSNorm's y; the sigmoid and the product in float32.

    Source: SK Telecom 2026 (A.X K2).
    """

    def __init__(self, size: int, norm: NormSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        super().__init__(size, eps=norm.eps, zero_centred=norm.zero_centred, rounds_once=norm.rounds_once, dtype=dtype)
        self.down = Linear(size, norm.gate_rank, dtype=dtype, rngs=rngs)
        self.up = Linear(norm.gate_rank, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, parts: Shards = WHOLE) -> jax.Array:  # [T, size] -> the same
        y = super().__call__(x, parts)
        gate = self.up(jax.nn.silu(self.down(y))).astype(jnp.float32)
        return (y.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(y.dtype)


class GroupedNorm(nnx.Module):
    """y = weight * (x / sqrt(mean(x²) + eps)), the mean over each of some groups of the last axis; the quotient is
    rounded to `dtype` first. On a mesh a device has some of the groups, or a part of the only one."""

    def __init__(self, size: int, num_groups: int, *, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.num_groups, self.eps = num_groups, eps

    def __call__(self, x: jax.Array, dtype: jnp.dtype, parts: Shards) -> jax.Array:  # [T, size] float32 -> the same
        grouped = x.reshape(len(x), max(self.num_groups // parts.size, 1), -1)
        mean = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
        mean = parts.sum(mean) / parts.size if self.num_groups == 1 else mean
        quotient = (grouped * jax.lax.rsqrt(mean + self.eps)).reshape(x.shape).astype(dtype)
        return self.weight[...][None] * quotient


def unit_rms(x: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x²) + eps) over the last axis, in float32, rounded to x's dtype: an RMSNorm without a weight."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """y = weight * (x - mean) / sqrt(variance + eps) + bias over the last axis; rounded to x's dtype at the end.

    zero_centred: 1 + weight in place of weight. Without bias nothing is added.
    Source: Ba et al. 2016, section 3.1, with the variance of the population.
    """

    def __init__(
        self, size: int, *, eps: float, bias: bool = True, zero_centred: bool = False, dtype: jnp.dtype
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((size,), dtype) if zero_centred else jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype)) if bias else None
        self.eps = eps
        self.zero_centred = zero_centred

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size] -> the same
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], range(x.ndim - 1)).astype(jnp.float32)
        y = wide * scale * (1 + weight if self.zero_centred else weight)
        if self.bias is not None:
            y += jnp.expand_dims(self.bias[...], range(x.ndim - 1)).astype(jnp.float32)
        return y.astype(x.dtype)


def norm_of(norm: NormSpec, size: int, *, dtype: jnp.dtype) -> RMSNorm | LayerNorm:
    """A norm as those between the layers of this model are."""
    if norm.kind == "layer":
        return LayerNorm(size, eps=norm.eps, bias=norm.bias, zero_centred=norm.zero_centred, dtype=dtype)
    return rms_norm_of(norm, size, dtype=dtype)


def rms_norm_of(norm: NormSpec, size: int, *, dtype: jnp.dtype) -> RMSNorm:
    """A norm of heads, with the model's eps, centre and rounding."""
    return RMSNorm(size, eps=norm.eps, zero_centred=norm.zero_centred, rounds_once=norm.rounds_once, dtype=dtype)
