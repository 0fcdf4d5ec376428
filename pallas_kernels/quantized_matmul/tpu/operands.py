"""Operands of the matrix unit: x in chunks of inputs, and codes as numbers that it takes without arithmetic.

E2M1 and unsigned codes of 4 bits are floats of 8 bits with another exponent: E4M3 without sign counts 0, 1, .. 15
below its second power of two, and has the bits of E2M1 in its middle. So a nibble is masked, not converted, and
`unit` is what the number is to be multiplied with. Two nibbles of a byte are inputs 2i and 2i + 1: a chunk's
inputs are taken in the order evens, odds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.tpu.config import LANES, ProductForm


def in_chunks(x: jax.Array, inputs: int, form: ProductForm) -> jax.Array:  # [T, I] -> [I / inputs, n T, inputs]
    """x chunk by chunk, for each of its n groups once, zero outside of the group."""
    T, I = x.shape
    chunks = in_order(x, inputs if form.is_packed else None).reshape(T, I // inputs, inputs).transpose(1, 0, 2)
    if form.group >= inputs:
        return chunks
    place = np.arange(inputs)
    of_lane = (2 * (place % (inputs // 2)) + place // (inputs // 2) if form.is_packed else place) // form.group
    masked = [jnp.where(jnp.asarray(of_lane == j)[None, None, :], chunks, 0) for j in range(inputs // form.group)]
    return jnp.concatenate(masked, axis=1)


def in_order(x: jax.Array, inputs: int | None) -> jax.Array:
    """x [T, I] with each chunk of so many inputs in the order evens, odds; x itself for None."""
    return x if inputs is None else x.reshape(x.shape[0], -1, inputs // 2, 2).swapaxes(2, 3).reshape(x.shape)


def operands(codes: jax.Array, form: ProductForm, inputs: int) -> list[jax.Array]:
    """Codes [outputs, bytes] of one or two chunks as arrays [outputs, inputs], one for each chunk."""
    if not form.is_packed:
        return [codes]
    words = pltpu.bitcast(codes, jnp.uint32)
    if inputs > LANES:
        return [jnp.concatenate([_floats(words, 0, form), _floats(words, 4, form)], axis=1)]
    # 128 bytes are two chunks of 64: their evens and odds are put side by side
    turned = pltpu.roll(words, LANES // 2, 1)
    is_first = jax.lax.broadcasted_iota(jnp.int32, words.shape, 1) < LANES // 2
    first = jnp.where(is_first, words, turned >> 4)
    second = jnp.where(is_first, turned, words >> 4)
    return [_floats(both, 0, form) for both in (first, second)]


def _floats(words: jax.Array, shift: int, form: ProductForm) -> jax.Array:
    """The nibbles at a shift of each byte, as floats of 8 bits that the matrix unit takes."""
    words = words >> shift if shift else words
    # what matrix units without E4M3 take has the exponent's bias 11, and no minus zero
    dtype = jnp.float8_e4m3fn if form.native else jnp.float8_e4m3b11fnuz
    if form.kind == "int4":
        return pltpu.bitcast(words & jnp.uint32(0x0F0F0F0F), dtype)
    return pltpu.bitcast(_e2m1_bits(words, has_minus_zero=form.native), dtype)


def _e2m1_bits(words: jax.Array, *, has_minus_zero: bool) -> jax.Array:
    """The low nibbles of each byte as E2M1, with their exponent and fraction in the middle of E4M3's."""
    signs, rest = words & jnp.uint32(0x08080808), words & jnp.uint32(0x07070707)
    if not has_minus_zero:
        signs &= rest + jnp.uint32(0x07070707)
    return (signs << 4) | (rest << 2)


def nibbles(codes: jax.Array, form: ProductForm) -> list[jax.Array]:
    """The codes of a chunk's even and odd inputs as numbers, which may count in 16ths; see `nibble_unit`."""
    words = pltpu.bitcast(codes, jnp.uint32)
    if form.kind == "mxfp4":
        halves = [words, words >> 4]
        return [pltpu.bitcast(_e2m1_bits(half, has_minus_zero=True), jnp.float8_e4m3fn) for half in halves]
    if form.has_zeros:
        return [pltpu.bitcast((words >> jnp.uint32(shift)) & jnp.uint32(0x0F0F0F0F), jnp.int8) for shift in (0, 4)]
    high = [words << jnp.uint32(4), words]  # less 8 by the sign: 16 times the value
    return [pltpu.bitcast((half & jnp.uint32(0xF0F0F0F0)) ^ jnp.uint32(0x80808080), jnp.int8) for half in high]


def nibble_unit(form: ProductForm) -> float:
    """A code's value over what `nibbles` gives."""
    return {"mxfp4": 2.0**6, "int4": 1.0 if form.has_zeros else 1 / 16}.get(form.kind, 1.0)


def group_sums(x: jax.Array, num_groups: int) -> jax.Array:
    """The sum of each group's inputs, which a zero point is multiplied with.

    [T, 1] float32; of several groups [2 T, num_groups] bfloat16, 16 bits of each sum in two parts.
    """
    sums = jnp.sum(x.astype(jnp.float32).reshape(x.shape[0], num_groups, -1), axis=-1)
    if num_groups == 1:
        return sums
    high = jax.lax.reduce_precision(sums, exponent_bits=8, mantissa_bits=7)  # a cast and back XLA would leave out
    return jnp.concatenate([high, sums - high]).astype(jnp.bfloat16)


def scale_values(scales: jax.Array) -> jax.Array:
    """Scales in float32. E8M0's bytes are exponents; the least of them, 2^-127, is zero as the TPU counts."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
