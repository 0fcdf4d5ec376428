"""Rounding of activations before a product.

    scale = max |x| / limit over the inputs that share it      code = x / scale, rounded half to even, within the range

The limits are the largest codes, 127 and 448. compressed-tensors' own emulation divides by 127.5, which puts each
token's largest input on a tie between two codes; engines that serve its files divide by 127, and so does this.
Models that were trained with scales of UE8M0 (DeepSeek-V3.1) round them up to powers of two, as published code does.
Source: Xiao et al. 2022 (SmoothQuant), section 2; DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.2.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight, spread

LIMITS = {"int8": 127.0, "fp8_e4m3": 448.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded:
    """Tokens as codes and scales."""

    codes: jax.Array  # [T, I] int8 or float8_e4m3fn
    scales: jax.Array  # [T or 1, 1 or I / activation_group] float32

    def decoded(self) -> jax.Array:  # [T, I] float32
        """The values that the codes stand for."""
        return self.codes.astype(jnp.float32) * spread(self.scales, self.codes.shape[1])


def rounded(x: jax.Array, weight: QuantizedWeight, scale: jax.Array | None = None) -> Rounded:
    """x [T, I] as the weight's form rounds it, in float32. scale: of `token_scales`, which None calls."""
    if weight.activations not in LIMITS:
        raise ValueError(f"activations is {weight.activations!r}; it must be one of {sorted(LIMITS)}, or None")
    x = x.astype(jnp.float32)
    scale = token_scales(x, weight) if scale is None else scale
    share = x / spread(scale, x.shape[1])
    if weight.activations == "int8":
        return Rounded(codes=jnp.clip(jnp.round(share), -128, 127).astype(jnp.int8), scales=scale)
    limit = LIMITS["fp8_e4m3"]
    return Rounded(codes=jnp.clip(share, -limit, limit).astype(jnp.float8_e4m3fn), scales=scale)


def given_to_codes(
    x: jax.Array, weight: QuantizedWeight, scales: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The left operand of a product with a weight or a stack, and the result's factor, [T, 1] or [1, 1], or None.

    scales: of activations, as token_scales gives them; by default those of x.
    """
    if weight.activations is None:
        return x, None
    tokens = rounded(x, weight, scales)
    if weight.scales.shape[-1] > 1 or tokens.scales.shape[-1] > 1:
        return tokens.decoded().astype(x.dtype), None
    exact = tokens.codes.dtype == jnp.int8 and weight.kind == "int8" and weight.zeros is None
    return tokens.codes if exact else tokens.codes.astype(x.dtype), tokens.scales


def token_scales(x: jax.Array, weight: QuantizedWeight) -> jax.Array:  # [T, I] -> [T or 1, 1 or I / activation_group]
    """The scales of activations, float32: the form's own one, or each token's by its largest inputs."""
    assert weight.activations is not None
    if weight.input_scale is not None:
        return weight.input_scale[None, :]
    groups = x.astype(jnp.float32).reshape(x.shape[0], -1, weight.activation_group or x.shape[1])
    largest = jnp.max(jnp.abs(groups), axis=-1)
    scale = jnp.where(largest == 0, 1.0, largest / LIMITS[weight.activations])
    return _next_power(scale) if weight.has_power_scales else scale


def _next_power(scale: jax.Array) -> jax.Array:  # float32 above 0 -> the same
    """The least power of two that is not below; by its bits, for a logarithm rounds."""
    fraction = jnp.uint32((1 << 23) - 1)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) + fraction
    return jax.lax.bitcast_convert_type(bits & ~fraction, jnp.float32)
