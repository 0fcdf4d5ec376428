"""Matrix products with weights that are kept as codes and scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.activations import token_scales
from pallas_kernels.quantized_matmul.product_support import BY_INT8, form_class, implementation_of, refusals
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, decode
from pallas_kernels.shapes import check_shapes

__all__ = [
    "BY_INT8",
    "QuantizedWeight",
    "decode",
    "form_class",
    "implementation_of",
    "quantized_matmul",
    "refusals",
    "token_scales",
]


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    activation_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:  # [T, O] out_dtype, x's when None
    """round(x) Wᵀ, where the weight stands for W [O, I], and round(x) is x unless the form rounds activations.

    x: [T, I], or [T, J] where the weight's order chooses I of J inputs. Accumulated in float32 or exactly; int8 by int8
    is exact, so its bits depend neither on companions nor on the number of rows. activation_scales: of `token_scales`,
    where x is a part of each token; by default those of x. implementation: None is "mosaic_tpu" where the weight names
    a TPU, which its kernels then are for, "mosaic_gpu" where it names a GPU, and else "xla".
    Raises ValueError for shapes that do not fit, for an unknown implementation and for a weight that it does not take.
    """
    leaves = [("O I", weight), ("O S", weight.scales)]
    leaves += [] if weight.zeros is None else [("O S", weight.zeros)]
    leaves += [("T I", x)] if weight.order is None else [("T J", x), ("I", weight.order)]
    sizes = check_shapes(*leaves)
    for name, count in (("groups of scales", sizes["S"]), ("activation_group", weight.activation_group or 1)):
        if sizes["I"] % count:
            raise ValueError(f"{name}, {count}, do not divide the {sizes['I']} inputs")
    kernels = implementation_of(weight.kernels)
    implementation = implementation or kernels
    dtype = jnp.dtype(out_dtype or x.dtype)
    if implementation == "xla":
        return xla.quantized_matmul(x, weight, dtype, activation_scales)
    if implementation not in ("mosaic_tpu", "mosaic_gpu"):
        raise ValueError(
            f"implementation is {implementation!r}; quantized_matmul has 'xla', 'mosaic_tpu', 'mosaic_gpu'"
        )
    if weight.kernels is None or implementation != kernels:
        named = implementation[-3:].upper()
        raise ValueError(
            f"implementation is {implementation!r}, and the weight names no {named}; give one as `kernels`"
        )
    if reasons := refusals(weight, x.dtype, weight.kernels):
        raise ValueError(f"{kernels!r} does not multiply this weight, take 'xla': {'; '.join(reasons)}")
    run: Any
    if kernels == "mosaic_gpu":  # imports that no other platform should pay for
        from pallas_kernels.quantized_matmul import mosaic_gpu as run
    else:
        from pallas_kernels.quantized_matmul import mosaic_tpu as run
    return run.quantized_matmul(x, weight, dtype, activation_scales)
