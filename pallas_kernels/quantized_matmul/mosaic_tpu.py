"""quantized_matmul on TPUs: x is put in order and rounded in XLA, codes are decoded in VMEM."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul.activations import given_to_codes
from pallas_kernels.quantized_matmul.tpu.config import LANES, FewRows, ManyRows, ProductForm, are_few
from pallas_kernels.quantized_matmul.tpu.few_rows import few_rows
from pallas_kernels.quantized_matmul.tpu.many_rows import many_rows
from pallas_kernels.quantized_matmul.tpu.operands import group_sums, in_chunks, in_order
from pallas_kernels.quantized_matmul.weight import QuantizedWeight


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    out_dtype: jnp.dtype,
    activation_scales: jax.Array | None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See the package's quantized_matmul; `support.refusals` says what it takes."""
    if weight.order is not None:
        x = jnp.take(x, weight.order, axis=1)
    given, scales = given_to_codes(x, weight, activation_scales)
    dtype = out_dtype if scales is None else jnp.dtype(jnp.float32)
    y = _product(given, weight, dtype, interpret)
    return y if scales is None else (y * scales).astype(out_dtype)


def form_of(weight: QuantizedWeight) -> ProductForm:
    """The kernels' specialisation; weight may be shapes. It names a TPU."""
    assert weight.kernels is not None, "what names no TPU is multiplied in XLA"
    has_zeros = weight.zeros is not None
    return ProductForm(
        kind=weight.kind,
        num_inputs=weight.shape[-1],
        num_groups=weight.scales.shape[-1],
        middle=8.0 if weight.kind == "int4" and not has_zeros else 0.0,
        has_zeros=has_zeros,
        native=weight.kernels.fp8_flops_per_s is not None,
    )


def _product(x: jax.Array, weight: QuantizedWeight, out_dtype: jnp.dtype, interpret: Any) -> jax.Array:
    T, O = x.shape[0], weight.shape[0]
    form, target = form_of(weight), weight.kernels
    assert target is not None
    zeros = None if weight.zeros is None else weight.zeros.astype(jnp.float32).T
    scales = weight.scales.astype(jnp.float32) if weight.scales.dtype == jnp.float16 else weight.scales
    how: dict[str, Any] = {"form": form, "out_dtype": out_dtype, "interpret": interpret}
    if not are_few(T, form, target):
        config = ManyRows.choose(T, O, form, target)
        x = in_order(_filled(x, config.tile_rows), 2 * LANES if form.is_packed else None)
        return many_rows(x, weight.codes, scales.T, zeros, config=config, **how)[:T]
    few = FewRows.choose(T, O, form, target)
    x = _filled(x, few.num_rows)
    sums = group_sums(x, form.num_groups) if form.middle or form.has_zeros else None
    chunks = in_chunks(x, few.inputs, form)
    return few_rows(chunks, sums, weight.codes, scales.T, zeros, config=few, **how)[:T]


def _filled(x: jax.Array, unit: int) -> jax.Array:
    """With rows of zeros up to a multiple of unit."""
    return jnp.pad(x, ((0, -x.shape[0] % unit), (0, 0)))
