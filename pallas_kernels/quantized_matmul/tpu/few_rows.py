"""Products of a few rows: bound by reading codes, so each tile of them crosses HBM once while the one before is used.

A chunk's product with all groups of its inputs is one product with masked copies of the rows; each copy's result is
multiplied with its group's scales, which lie along the outputs. Zero points are taken off as z s sum(x), a small
product of its own, so that codes are multiplied as they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.tpu.config import FewRows, ProductForm
from pallas_kernels.quantized_matmul.tpu.operands import operands, scale_values

_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))


def few_rows(
    x: jax.Array,  # [chunks, n T, inputs] bf16 or int8
    sums: jax.Array | None,  # [T, 1] float32, or [2 T, G] bf16
    codes: jax.Array,  # [O, I] or [O, I / 2]
    scales: jax.Array,  # [G, O]
    zeros: jax.Array | None,  # [G, O] float32
    *,
    form: ProductForm,
    config: FewRows,
    out_dtype: jnp.dtype,
    interpret: Any = False,
) -> jax.Array:  # [T, O]
    """x times what the codes stand for."""
    T, tile, O = config.num_rows, config.tile_out, codes.shape[0]
    G = form.num_groups

    def whole(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(array.shape, lambda i: (0,) * array.ndim)

    along = pl.BlockSpec((G, tile), lambda i: (0, i))
    arguments = [(x, whole(x)), (codes, pl.BlockSpec((tile, codes.shape[1]), lambda i: (i, 0))), (scales, along)]
    arguments += [] if sums is None else [(sums, whole(sums))]
    arguments += [] if zeros is None else [(zeros, along)]
    names = ["x", "codes", "scales", *(["sums"] if sums is not None else []), *(["zeros"] if zeros is not None else [])]

    def body(*refs) -> None:
        tile_of_outputs(dict(zip([*names, "out", "scale"], refs, strict=True)), form, config)

    return pl.pallas_call(
        body,
        grid=(-(-O // tile),),
        in_specs=[spec for _, spec in arguments],
        out_specs=pl.BlockSpec((T, tile), lambda i: (0, i)),
        out_shape=jax.ShapeDtypeStruct((T, O), out_dtype),
        scratch_shapes=[pltpu.VMEM((G, tile), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_limit_bytes),
        interpret=interpret,
        name="quantized_matmul",
    )(*(array for array, _ in arguments))


def tile_of_outputs(refs: dict[str, Any], form: ProductForm, config: FewRows) -> None:
    """The kernel of one tile of outputs.

    refs: x, codes, scales, out; sums, zeros where there are zero points; scale is scratch.
    """
    refs["scale"][...] = scale_values(refs["scales"][...])
    for first in range(0, config.tile_out, config.part_out):  # in straight code: a loop lets the matrix unit run dry
        part = slice(first, first + config.part_out)
        total = _sum_of_chunks(refs, part, form, config) * form.unit
        if "sums" in refs:
            total -= _of_zero_points(refs, part, form)
        if form.num_groups == 1:
            total *= refs["scale"][:, part]
        refs["out"][:, part] = total.astype(refs["out"].dtype)


def _sum_of_chunks(refs: dict[str, Any], part: slice, form: ProductForm, config: FewRows) -> jax.Array:  # [T, part]
    """Products of codes with all scales but where there is one only."""
    x, codes, T = refs["x"], refs["codes"], config.num_rows
    step = max(128, config.inputs // 2) if form.is_packed else config.inputs  # bytes
    exact = x.dtype == jnp.int8
    total = jnp.zeros((T, config.part_out), jnp.int32 if exact else jnp.float32)
    chunk = 0
    for at in range(0, codes.shape[1], step):
        for operand in operands(codes[part, at : at + step], form, config.inputs):
            found = product(x[chunk], operand, total.dtype)
            if form.num_groups == 1:
                total += found
            else:
                first = chunk * config.inputs // form.group
                for j in range(min(found.shape[0] // T, form.num_groups - first)):  # the last chunk may lack groups
                    total += found[j * T : (j + 1) * T] * refs["scale"][first + j : first + j + 1, part]
            chunk += 1
    return total.astype(jnp.float32)


def product(x: jax.Array, operand: jax.Array, dtype: jnp.dtype) -> jax.Array:  # [T, k], [part, k] -> [T, part]
    """The matrix unit's; codes of 8 bits stand for themselves."""
    if operand.dtype == jnp.int8 and x.dtype != jnp.int8:
        operand = operand.astype(x.dtype)
    return jax.lax.dot_general(x, operand, _NT, preferred_element_type=dtype)


def _of_zero_points(refs: dict[str, Any], part: slice, form: ProductForm) -> jax.Array:  # [T, part]
    """The zero points' share of the result; without scales where there is one only."""
    points = refs["zeros"][:, part] if "zeros" in refs else form.middle
    if form.num_groups == 1:
        return refs["sums"][...] * points
    offsets = refs["scale"][:, part] * points
    high = offsets.astype(jnp.bfloat16)
    low = (offsets - high.astype(jnp.float32)).astype(jnp.bfloat16)
    are_exact = "zeros" not in refs and refs["scales"].dtype == jnp.bfloat16  # eight times a scale
    pieces = [high] if are_exact else [high, low]
    found = [jax.lax.dot_general(refs["sums"][...], p, _NN, preferred_element_type=jnp.float32) for p in pieces]
    total = functools.reduce(jnp.add, found)
    T = total.shape[0] // 2
    return total[:T] + total[T:]
