"""Matrix products with weights that are kept as codes and scales."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.activations import token_scales
from pallas_kernels.quantized_matmul.product_support import form_class, refusals
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, decode
from pallas_kernels.shapes import check_shapes

__all__ = ["QuantizedWeight", "decode", "form_class", "quantized_matmul", "refusals", "token_scales"]


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    activation_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:  # [T, O] out_dtype, x's when None
    """round(x) Wᵀ, W [O, I] what the weight stands for, round(x) x itself unless the form rounds activations.

    x: [T, I], or with an order of inputs [T, J] that it chooses from. Accumulated in float32 or exactly; int8 by int8
    is exact, so its bits depend neither on companions nor on the number of rows. activation_scales: as token_scales
    gives them, for x that is a part of each token; None computes them. implementation: None is "mosaic_tpu" where the
    weight names a TPU, which its kernels then are for, and else "xla".
    Raises ValueError for shapes that do not fit, for an unknown implementation and for what that one does not take.
    """
    leaves = [("O I", weight), ("O S", weight.scales)]
    leaves += [] if weight.zeros is None else [("O S", weight.zeros)]
    leaves += [("T I", x)] if weight.order is None else [("T J", x), ("I", weight.order)]
    sizes = check_shapes(*leaves)
    for name, count in (("groups of scales", sizes["S"]), ("activation_group", weight.activation_group or 1)):
        if sizes["I"] % count:
            raise ValueError(f"{name}, {count}, do not divide the {sizes['I']} inputs")
    implementation = implementation or ("xla" if weight.kernels is None else "mosaic_tpu")
    dtype = jnp.dtype(out_dtype or x.dtype)
    if implementation == "xla":
        return xla.quantized_matmul(x, weight, dtype, activation_scales)
    if implementation != "mosaic_tpu":
        raise ValueError(f"implementation is {implementation!r}; quantized_matmul has 'xla' and 'mosaic_tpu'")
    if weight.kernels is None:
        raise ValueError("implementation is 'mosaic_tpu', and the weight names no TPU; give its Target as `kernels`")
    if reasons := refusals(weight, x.dtype, weight.kernels):
        raise ValueError(f"'mosaic_tpu' does not multiply this weight, take 'xla': {'; '.join(reasons)}")
    from pallas_kernels.quantized_matmul import mosaic_tpu  # an import that no other platform should pay for

    return mosaic_tpu.quantized_matmul(x, weight, dtype, activation_scales)
