"""quantized_matmul in plain XLA.

Where an output has one scale, codes are multiplied as they are and the sum is scaled: nothing is rounded that the form
does not round. Elsewhere the weight is decoded before the product. On GPUs float8 is given to XLA as it is, which
multiplies it on units of 8 bits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.activations import Rounded, rounded
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, decode, scales, values

# XLA:CPU multiplies one row of int8 at 1 GFLOP/s, [3072, 1024], two cores, jax 0.10.2; 2 rows at 25, 16 at 270.
_MIN_INT8_ROWS = 8


def quantized_matmul(
    x: jax.Array, weight: QuantizedWeight, out_dtype: jnp.dtype, activation_scales: jax.Array | None
) -> jax.Array:
    """See the package's quantized_matmul."""
    if weight.order is not None:
        x = jnp.take(x, weight.order, axis=1)
    one_scale = weight.scales.shape[-1] == 1
    if weight.activations is None:
        if not one_scale:
            return _dot(x, decode(weight, x.dtype), out_dtype)
        y = _dot(x, values(weight).astype(x.dtype), jnp.float32)
        return (y * scales(weight)[None, :, 0]).astype(out_dtype)
    tokens = rounded(x, weight, activation_scales)
    if not one_scale or tokens.scales.shape[-1] > 1:
        return _dot(tokens.decoded().astype(x.dtype), decode(weight, x.dtype), out_dtype)
    y = _codes_dot(tokens, weight, x.dtype)
    return (y * tokens.scales * scales(weight)[None, :, 0]).astype(out_dtype)


def _codes_dot(tokens: Rounded, weight: QuantizedWeight, dtype: jnp.dtype) -> jax.Array:  # [T, O] float32
    """Codes by codes: int8 by int8 is exact, others are summed in float32."""
    if tokens.codes.dtype == weight.codes.dtype == jnp.float8_e4m3fn:

        def widened(codes: jax.Array, others: jax.Array) -> jax.Array:
            return _dot(codes.astype(dtype), others.astype(dtype), jnp.float32)

        return jax.lax.platform_dependent(tokens.codes, weight.codes, cuda=float8_dot, default=widened)
    if tokens.codes.dtype != jnp.int8 or weight.kind != "int8" or weight.zeros is not None:
        return _dot(tokens.codes.astype(dtype), values(weight).astype(dtype), jnp.float32)
    num_rows = tokens.codes.shape[0]
    codes = jnp.pad(tokens.codes, ((0, max(0, _MIN_INT8_ROWS - num_rows)), (0, 0)))
    return _dot(codes, weight.codes, jnp.int32)[:num_rows].astype(jnp.float32)


def float8_dot(codes: jax.Array, others: jax.Array) -> jax.Array:  # [T, I], [O, I] float8_e4m3fn -> [T, O] float32
    """The product that XLA's GPU compiler takes for one of float8, of Triton or of cuBLASLt, whichever is faster.

    Highest: by default cuBLASLt sums with some 14 bits. An algorithm of float8 would name the same,
    but for it XLA makes both operands bfloat16 in memory first (jax 0.10.2).
    """
    how = (((1,), (1,)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(codes, others, how, precision=highest, preferred_element_type=jnp.float32)


def _dot(x: jax.Array, weight: jax.Array, out_dtype: jax.typing.DTypeLike) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
