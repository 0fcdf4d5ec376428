"""Matrix products with weights that are kept as codes and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.activations import token_scales
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, decode
from pallas_kernels.shapes import check_shapes

__all__ = ["QuantizedWeight", "decode", "quantized_matmul", "token_scales"]


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    activation_scales: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:  # [T, O] out_dtype, x's when None
    """round(x) Wᵀ, W [O, I] what the weight stands for, round(x) x itself unless the form rounds activations.

    x: [T, I], or with an order of inputs [T, J] that it chooses from. Accumulated in float32 or exactly; int8 by int8
    is exact, so its bits depend neither on companions nor on the number of rows. activation_scales: as token_scales
    gives them, for x that is a part of each token; None computes them.
    Raises ValueError for shapes that do not fit and for an unknown implementation.
    """
    leaves = [("O I", weight), ("O S", weight.scales)]
    leaves += [] if weight.zeros is None else [("O S", weight.zeros)]
    leaves += [("T I", x)] if weight.order is None else [("T J", x), ("I", weight.order)]
    sizes = check_shapes(*leaves)
    for name, count in (("groups of scales", sizes["S"]), ("activation_group", weight.activation_group or 1)):
        if sizes["I"] % count:
            raise ValueError(f"{name}, {count}, do not divide the {sizes['I']} inputs")
    if implementation != "xla":
        raise ValueError(f"implementation is {implementation!r}; quantized_matmul has only 'xla'")
    return xla.quantized_matmul(x, weight, jnp.dtype(out_dtype or x.dtype), activation_scales)
