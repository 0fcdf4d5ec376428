"""Products of many rows: bound by the matrix unit, so weights are decoded beside the product with those before.

A step is a part of the outputs and of the inputs. Two steps' weights, rounded to the dtype of x, stand in scratch by
turns. Codes of 8 bits with one scale for each output are not decoded: the sum is scaled.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.tpu.config import LANES, ManyRows, ProductForm
from pallas_kernels.quantized_matmul.tpu.few_rows import product
from pallas_kernels.quantized_matmul.tpu.operands import nibble_unit, nibbles, scale_values

_CHUNK = 2 * LANES  # inputs that are decoded at once


def many_rows(
    x: jax.Array,  # [T, I] bf16 or int8, chunks of packed codes in the order evens, odds
    codes: jax.Array,  # [O, I] or [O, I / 2]
    scales: jax.Array,  # [G, O]
    zeros: jax.Array | None,  # [G, O] float32
    *,
    form: ProductForm,
    config: ManyRows,
    out_dtype: jnp.dtype,
    interpret: Any = False,
) -> jax.Array:  # [T, O]
    """x times what the codes stand for."""
    (T, I), O, tile, rows = x.shape, codes.shape[0], config.tile_out, config.tile_rows
    along = pl.BlockSpec((form.num_groups, tile), lambda t, o: (0, o))
    arguments = [
        (x, pl.BlockSpec((rows, I), lambda t, o: (t, 0))),
        (codes, pl.BlockSpec((tile, codes.shape[1]), lambda t, o: (o, 0))),
        (scales, along),
        *([] if zeros is None else [(zeros, along)]),
    ]
    lanes = -(-form.num_groups // LANES) * LANES
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    adds = form.is_decoded and config.inputs < I
    scratch = {"total": pltpu.VMEM((rows, tile) if adds else (8, LANES), dtype)}
    if form.is_decoded:
        scratch |= dict.fromkeys(("even", "odd"), pltpu.VMEM((config.part_out, config.inputs), x.dtype))
        scratch |= dict.fromkeys(("scale", "zero"), pltpu.VMEM((tile, lanes), jnp.float32))
    names = ["x", "codes", "scales", *([] if zeros is None else ["zeros"]), "out", *scratch]

    def body(*refs) -> None:
        _kernel(dict(zip(names, refs, strict=True)), form, config)

    return pl.pallas_call(
        body,
        grid=(T // rows, O // tile),
        in_specs=[spec for _, spec in arguments],
        out_specs=pl.BlockSpec((rows, tile), lambda t, o: (t, o)),
        out_shape=jax.ShapeDtypeStruct((T, O), out_dtype),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=config.vmem_limit_bytes),
        interpret=interpret,
        name="quantized_matmul_many",
    )(*(array for array, _ in arguments))


def _kernel(refs: dict[str, Any], form: ProductForm, config: ManyRows) -> None:
    if not form.is_decoded:
        found = product(refs["x"][...], refs["codes"][...], refs["total"].dtype)
        out = found.astype(jnp.float32) * scale_values(refs["scales"][...])
        refs["out"][...] = out.astype(refs["out"].dtype)
        return
    total, per_part = refs["total"], form.num_inputs // config.inputs
    num_steps = config.tile_out // config.part_out * per_part
    if per_part > 1:
        total[...] = jnp.zeros(total.shape, total.dtype)
    _turn_scales(refs, form)

    def multiply(step: Any, weights: jax.Array) -> None:
        part = pl.ds(pl.multiple_of(step // per_part * config.part_out, config.part_out), config.part_out)
        at = pl.ds(pl.multiple_of(step % per_part * config.inputs, config.inputs), config.inputs)
        found = product(refs["x"][:, at], weights, total.dtype)
        if per_part > 1:
            total[:, part] += found
        else:
            refs["out"][:, part] = found.astype(refs["out"].dtype)

    _decode(refs, refs["even"], 0, form, config)

    @pl.loop(0, num_steps // 2)
    def _(pair):
        _decode(refs, refs["odd"], 2 * pair + 1, form, config)
        multiply(2 * pair, refs["even"][...])
        _decode(refs, refs["even"], jnp.minimum(2 * pair + 2, num_steps - 1), form, config)
        multiply(2 * pair + 1, refs["odd"][...])

    if num_steps % 2:
        multiply(num_steps - 1, refs["even"][...])
    if per_part > 1:
        refs["out"][...] = total[...].astype(refs["out"].dtype)


def _turn_scales(refs: dict[str, Any], form: ProductForm) -> None:
    """Scales and zero points with groups on lanes."""
    tile, lanes = refs["scale"].shape
    for name, source in (("scale", "scales"), ("zero", "zeros")):
        if source in refs:
            found = scale_values(refs[source][...]) * (nibble_unit(form) if name == "scale" else 1.0)
            if rest := lanes - found.shape[0]:
                found = jnp.concatenate([found, jnp.zeros((rest, tile), jnp.float32)])
            refs[name][...] = found.T


def _decode(refs: dict[str, Any], out: Any, step: Any, form: ProductForm, config: ManyRows) -> None:
    """A step's weights, as x is ordered."""
    per_part = form.num_inputs // config.inputs
    part = pl.ds(pl.multiple_of(step // per_part * config.part_out, config.part_out), config.part_out)
    width = _CHUNK // 2 if form.is_packed else _CHUNK
    for k in range(config.inputs // _CHUNK):
        chunk = step % per_part * (config.inputs // _CHUNK) + k
        codes = refs["codes"][part, pl.ds(pl.multiple_of(chunk * width, width), width)]
        halves = nibbles(codes, form) if form.is_packed else [codes[:, :LANES], codes[:, LANES:]]
        first = pl.multiple_of(chunk * _CHUNK // form.group // LANES * LANES, LANES)
        for half, found in enumerate(halves):
            lane = jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
            group = (chunk * _CHUNK + (2 * lane if form.is_packed else half * LANES + lane)) // form.group - first
            values = found.astype(jnp.float32)
            if form.has_zeros:
                values -= jnp.take_along_axis(refs["zero"][part, pl.ds(first, LANES)], group, axis=1)
            weights = values * jnp.take_along_axis(refs["scale"][part, pl.ds(first, LANES)], group, axis=1)
            out[:, k * _CHUNK + half * LANES : k * _CHUNK + (half + 1) * LANES] = weights.astype(out.dtype)
