"""The kernel's work in registers, with the same in JAX for the interpreter.

A wgmma's left operand lies over four threads a row. Each loads 16 neighbouring bytes of a row of codes, and its
inputs keep the order in which they fall out of these bytes: x is put in the same order (`in_order`), so no thread
needs another's codes. Codes of 4 bits and floats of 8 are masked, not converted: as bfloat16 these bits are some power
of two below the value, which the scale makes up for.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul.gpu.config import PART, CodesForm
from pallas_kernels.quantized_matmul.gpu.decode import (
    decode_words,
    load_raw_factors,
    load_words,
    put_aside,
    store_transposed,
    take_back,
)

MATRIX = plgpu.Layout.WGMMA
_FACTORS = (PART, 8)  # a thread has a scale and a zero point of each of its two rows


def in_order(x: jax.Array, form: CodesForm) -> jax.Array:
    """x [T, I] with each chunk's inputs in the order in which threads decode them."""
    T = x.shape[0]
    if form.is_packed:  # thread, word, half of a word, nibble of a half
        return x.reshape(T, -1, 4, 4, 2, 4).transpose(0, 1, 3, 5, 2, 4).reshape(x.shape)
    return x.reshape(T, -1, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(x.shape)  # thread, word, half, byte


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductOps:
    """is_interpreted: take what the interpreter knows."""

    form: CodesForm
    is_interpreted: bool

    def full(self, shape: tuple[int, ...]) -> jax.Array:
        """Zeros in float32, as wgmma accumulates them."""
        array = jnp.zeros(shape, jnp.float32)
        return array if self.is_interpreted else plgpu.layout_cast(array, MATRIX)

    def load_factors(self, refs: Sequence[Any]) -> jax.Array:
        """Scales, and zero points where there are any, of 64 outputs and a chunk: refs [64, groups] in global memory.

        As they are stored: nothing waits for them here.
        """
        form = self.form
        if self.is_interpreted:
            found = [jnp.repeat(ref[...].astype(jnp.float32), 4 // form.groups_of_chunk, axis=1) for ref in refs]
            found += [jnp.zeros_like(found[0])] * (2 - len(found))
            return jnp.stack(found, axis=2).reshape(_FACTORS)
        result = plgpu.ShapeDtypeStruct(_FACTORS, jnp.int32, layout=MATRIX)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs), return_type=result)
        load = functools.partial(load_raw_factors, form)
        return inline(lambda context, *refs: load(*refs))(*refs)

    def decode(self, codes: Any, factors: jax.Array | None, scale_dtype: Any) -> jax.Array:
        """[64, chunk] bfloat16 of what a ref [64, 64 bytes] stands for, inputs in their order."""
        form = self.form
        if self.is_interpreted:
            return _decoded(codes[...], factors, form, scale_dtype)
        result = plgpu.ShapeDtypeStruct((PART, form.chunk), jnp.bfloat16, layout=MATRIX)
        layouts = () if factors is None else (MATRIX,)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *layouts), return_type=result)

        def run(context: Any, codes: Any, *factors: Any) -> Any:
            return decode_words(form, load_words(codes), *factors, scale_dtype=scale_dtype)

        return inline(run)(codes, *(() if factors is None else (factors,)))

    def accumulate(self, total: jax.Array, pieces: Sequence[tuple[int, Callable[[], jax.Array], Any]]) -> jax.Array:
        """total [outputs, tokens] and, for each piece (part, lhs [64, k], ref [tokens, k]), their product in its part.

        While one is multiplied, the next is decoded.
        """
        if self.is_interpreted:
            parts = jnp.split(total, total.shape[0] // PART)
            for part, lhs, rhs in pieces:
                parts[part] += jnp.dot(lhs().astype(jnp.float32), rhs[...].astype(jnp.float32).T)
            return jnp.concatenate(parts)

        def multiply(acc: Any) -> None:
            for part, lhs, rhs in pieces:
                of_part = acc if total.shape[0] == PART else acc.at[pl.ds(part * PART, PART)]
                plgpu.wgmma(of_part, lhs(), rhs.transpose((1, 0)))
                plgpu.wgmma_wait(1)

        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(total)
        return pl.run_state(multiply)(accumulator)

    def store(self, out: Any, total: jax.Array, *scales: Any) -> None:
        """Writes total [64, tokens] to a ref [tokens, 64] in global memory, times a scale for each output, [64, 1]."""
        if self.is_interpreted:
            scale = self.form.unit
            for ref in scales:
                scale *= ref[...].astype(jnp.float32)
            out[...] = (total * scale).T.astype(out.dtype)
            return
        inline: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType(), *(plgpu.RefType() for _ in scales)))
        inline(lambda context, *refs: store_transposed(self.form, *refs))(total, out, *scales)

    def put_aside(self, ref: Any, total: jax.Array) -> None:
        """Leaves a sum in shared memory, in an order of its own."""
        if self.is_interpreted:
            ref[...] = total
            return
        inline: Any = plgpu.inline_mgpu(arg_types=(MATRIX, plgpu.RefType()))
        inline(lambda context, total, ref: put_aside(total, ref))(total, ref)

    def take_back(self, ref: Any) -> jax.Array:
        """The sums that were put aside."""
        if self.is_interpreted:
            return ref[...]
        result = plgpu.ShapeDtypeStruct(ref.shape, jnp.float32, layout=MATRIX)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
        return inline(lambda context, ref: take_back(ref))(ref)

    def end_reading(self) -> None:
        """Before a barrier that lets transfers write what was read."""
        if self.is_interpreted:
            plgpu.commit_smem()


def _decoded(codes: jax.Array, factors: jax.Array | None, form: CodesForm, scale_dtype: Any) -> jax.Array:
    """Codes times their scales, rounded once."""
    found = _numbers(codes, form.kind)
    pairs = jnp.zeros((PART, 4, 2)) if factors is None else factors.reshape(PART, 4, 2)
    scales, zeros = pairs[..., 0], pairs[..., 1]
    if form.has_zeros:
        found -= jnp.repeat(zeros, form.quarter, axis=1)
    elif form.kind == "int4":
        found -= 8
    if form.has_scales:
        scales = 2.0 ** (scales - 127) if scale_dtype == jnp.uint8 else scales
        found *= jnp.repeat(scales, form.quarter, axis=1)
    return in_order((found / form.unit).astype(jnp.bfloat16), form)


def _numbers(codes: jax.Array, kind: str) -> jax.Array:  # bytes [64, 64] -> [64, chunk] float32
    """The codes' own numbers; those of int4 from 0 to 15."""
    if kind in ("int8", "fp8_e4m3"):
        dtype = jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
        return jax.lax.bitcast_convert_type(codes, dtype).astype(jnp.float32)
    nibbles = jnp.stack((codes & jnp.uint8(15), codes >> jnp.uint8(4)), axis=-1).reshape(codes.shape[0], -1)
    bits = nibbles.astype(jnp.int32)
    if kind == "int4":
        return bits.astype(jnp.float32)
    exponent, fraction = (bits >> 1 & 3).astype(jnp.float32), (bits & 1).astype(jnp.float32)
    size = jnp.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    return jnp.where(bits >= 8, -size, size)
