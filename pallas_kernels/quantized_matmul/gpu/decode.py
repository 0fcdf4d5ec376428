"""Codes to bfloat16 in registers, as Mosaic's operations on single threads.

A thread of a warpgroup has two rows of a wgmma's 64, eight apart, and a quarter of each row's inputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.quantized_matmul.gpu.config import CodesForm

_HALVES = 0x00010001  # a number of 16 bits in both halves of a word
_SIXTEEN, _SIXTEENTH = 0x4180, 0x3D80  # in bfloat16
_MIDDLE = 8  # what int4 is less where there are no zero points


def load_words(codes: Any) -> list[list[Any]]:
    """Loads four words of each of a thread's two rows from a ref [64, 64 bytes] in shared memory."""
    row, quarter = _place()
    words = ir.VectorType.get((4,), _i32())
    base, found = utils.memref_ptr(codes), []
    at = arith.addi(arith.muli(row, _int(64)), arith.muli(quarter, _int(16)))
    for half in range(2):
        place = utils.getelementptr(base, [arith.addi(at, _int(8 * 64 * half))], ir.IntegerType.get_signless(8))
        loaded = llvm.load(words, place, alignment=16)
        found.append([vector.extract(loaded, [], [i]) for i in range(4)])
    return found


def load_raw_factors(form: CodesForm, *refs: Any) -> Any:
    """An array [64, 8] in which a thread holds the bits of a scale and a zero point for each of its two rows."""
    row, quarter = _place()
    group = arith.divui(quarter, _int(4 // form.groups_of_chunk))
    found = []
    for half in range(2):
        pair = [_load_bits(form, ref, arith.addi(row, _int(8 * half)), group, i == 1) for i, ref in enumerate(refs)]
        pair += [_int(0)] * (2 - len(pair))
        found.append(vector.from_elements(ir.VectorType.get((2,), _i32()), pair))
    return _array(found, (64, 8), is_signed=True)


def _load_bits(form: CodesForm, ref: Any, row: Any, group: Any, is_signed: bool) -> Any:
    """A scale or a zero point of a ref [64, groups] in a word, as it is stored."""
    bits = ir.IntegerType.get_signless(utils.bitwidth(ir.MemRefType(ref.type).element_type))
    at = arith.addi(arith.muli(row, _int(form.num_groups)), group)
    loaded = llvm.load(bits, utils.getelementptr(utils.memref_ptr(ref), [at], bits))
    return loaded if bits == _i32() else (arith.extsi if is_signed else arith.extui)(_i32(), loaded)


def decode_words(form: CodesForm, words: list[list[Any]], factors: Any = None, *, scale_dtype: Any) -> Any:
    """An array [64, chunk] of bfloat16 from a thread's words."""
    found = []
    for half in range(2):
        scale = zero = None
        if factors is not None:
            pair = factors.registers.flat[half]
            if form.has_scales:
                scale = _scale(form, vector.extract(pair, [], [0]), scale_dtype)
            if form.has_zeros:
                zero = _zero(form, vector.extract(pair, [], [1]))
        if scale is None and form.unit != 1.0:
            scale = (_twice(_bfloat16(_float(_exponent(form)))),)
        found.append(list(_decoded(form, words[half], scale, zero)))
    registers = [found[half][column] for column in range(len(found[0])) for half in range(2)]
    bfloats = ir.VectorType.get((2,), ir.BF16Type.get())
    return _array([utils.bitcast(pair, bfloats) for pair in registers], (64, form.chunk), is_signed=None)


def store_transposed(form: CodesForm, total: Any, out: Any, scales: Any = None) -> None:
    """Writes an array [64, tokens] of float32, times scales [64, 1], to a ref [tokens, 64] of global memory."""
    row, quarter = _place()
    factors = [None if form.unit == 1.0 else _float(form.unit)] * 2
    if scales is not None:
        for half in range(2):
            bits = _load_bits(form, scales, arith.addi(row, _int(8 * half)), _int(0), False)
            scale = _float32(bits, ir.MemRefType(scales.type).element_type)
            factors[half] = scale if form.unit == 1.0 else arith.mulf(scale, _float(form.unit))
    kind = ir.MemRefType(out.type)
    (stride, _), _ = kind.get_strides_and_offset()
    base = utils.memref_ptr(out)
    for i, pair in enumerate(_in_pairs(total)):
        column, half = divmod(i, 2)
        for j, value in enumerate(pair):
            if (factor := factors[half]) is not None:
                value = arith.mulf(value, factor)
            if kind.element_type != ir.F32Type.get():
                value = arith.truncf(kind.element_type, value)
            token = arith.addi(arith.muli(quarter, _int(2)), _int(8 * column + j))
            at = arith.addi(arith.muli(token, _int(stride)), arith.addi(row, _int(8 * half)))
            llvm.store(value, utils.getelementptr(base, [at], kind.element_type))


def put_aside(total: Any, ref: Any) -> None:
    """Writes an array of float32 to a ref of its size in shared memory, for the same threads of another warpgroup."""
    for i, register in enumerate(total.registers.flat):
        llvm.store(register, _aside(ref, i, register.type))


def take_back(ref: Any) -> Any:
    """The sums that the same threads of another warpgroup have put aside."""
    layout, (rows, columns) = mgpu.WGMMA_LAYOUT, ir.MemRefType(ref.type).shape
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    count = int(np.prod(layout.registers_shape((rows, columns))))
    return _array([llvm.load(pair, _aside(ref, i, pair)) for i in range(count)], (rows, columns), is_signed=None)


def _aside(ref: Any, i: int, kind: Any) -> Any:
    """Where a thread's i-th register stands: those of neighbours side by side."""
    thread = arith.remui(utils.thread_idx(), _int(128))
    return utils.getelementptr(utils.memref_ptr(ref), [arith.addi(thread, _int(128 * i))], kind)


def _in_pairs(total: Any) -> Iterator[list[Any]]:
    """A thread's neighbouring tokens of one output: by columns of 8 tokens, then by its two rows."""
    flat = list(total.registers.flat)
    width = ir.VectorType(flat[0].type).shape[0]
    values = [vector.extract(register, [], [i]) for register in flat for i in range(width)]
    for i in range(0, len(values), 2):
        yield values[i : i + 2]


def _decoded(form: CodesForm, words: list[Any], scale: Any, zero: Any) -> Iterator[Any]:
    """A row's codes as bfloat16, two a word."""
    if form.kind == "int4":
        yield from _int4(words, scale, zero)
        return
    for word in words:
        for pair in {"mxfp4": _e2m1, "int8": _int8, "fp8_e4m3": _e4m3}[form.kind](word):
            number = pair if zero is None else _two("sub.rn.bf16x2", pair, zero)
            yield number if scale is None else _scaled(number, *scale)


def _scaled(pair: Any, high: Any, low: Any = None) -> Any:
    """A pair times a scale; with a low part, rounded about as often as a product in float32 is: once."""
    if low is None:
        return _two("mul.rn.bf16x2", pair, high)
    return _fused(pair, high, _two("mul.rn.bf16x2", pair, low))


def _int4(words: list[Any], scale: Any, zero: Any) -> Iterator[Any]:
    """Nibbles j and j + 4. bfloat16's least number counts the even ones, and 16 of it the odd, which are not shifted.

    Eight scales are as exact as one, so without zero points and low parts they are taken off in the same instruction.
    """
    is_fused = zero is None and len(scale) == 1
    less = _two("mul.rn.bf16x2", scale[0], _int((0x8000 | _MIDDLE) * _HALVES)) if is_fused else None
    zero = _int(_MIDDLE * _HALVES) if zero is None else zero
    zeros = (zero, _two("mul.rn.bf16x2", zero, _int(_SIXTEEN * _HALVES)))
    scales = (scale, tuple(_two("mul.rn.bf16x2", part, _int(_SIXTEENTH * _HALVES)) for part in scale))
    for word in words:
        for j in range(4):
            odd = j % 2
            pair = arith.andi(_shifted(word, -8 * (j // 2)), _int((0x00F0 if odd else 0x000F) * _HALVES))
            if less is not None:
                yield _fused(pair, scales[odd][0], less)
            else:
                yield _scaled(_two("sub.rn.bf16x2", pair, zeros[odd]), *scales[odd])


def _e2m1(word: Any) -> Iterator[Any]:
    """2^-126 times the value, of nibbles j and j + 4: its exponent and fraction stand around bfloat16's lowest.

    Sign and rest move by different distances; where both go left, one product is two shifts.
    """
    for j in range(2):
        moved = arith.muli(arith.andi(word, _int((0x000F << 4 * j) * _HALVES)), _int((1 << 12 | 1 << 6) >> 4 * j))
        yield arith.andi(moved, _int(0x81C0 * _HALVES))
    for j in range(2, 4):
        sign = arith.andi(_shifted(word, 12 - 4 * j), _int(0x8000 * _HALVES))
        yield arith.ori(arith.andi(_shifted(word, 6 - 4 * j), _int(0x01C0 * _HALVES)), sign)


def _int8(word: Any) -> Iterator[Any]:
    """The codes: 128 and seven bits, less 128 or, where the sign is set, 256."""
    for j in range(2):
        both = utils.prmt(word, _int(0x43), _int(0x4342 if j else 0x4140))
        rest, sign = arith.andi(both, _int(0xFF7F * _HALVES)), arith.andi(both, _int(0xFF80 * _HALVES))
        yield _two("sub.rn.bf16x2", rest, sign)


def _e4m3(word: Any) -> Iterator[Any]:
    """2^-120 times the value."""
    for j in range(2):
        both = utils.prmt(word, _int(0), _int(0x3424 if j else 0x1404))  # each in the upper byte of a half
        rest = arith.andi(_shifted(both, -4), _int(0x07F0 * _HALVES))
        yield arith.ori(rest, arith.andi(both, _int(0x8000 * _HALVES)))


def _exponent(form: CodesForm) -> float:
    """The factor that makes a code's bits, as bfloat16, its value over the form's unit."""
    return {"int4": 2.0**133, "mxfp4": 2.0**126, "fp8_e4m3": 2.0**120, "int8": 1.0}[form.kind] / form.unit


def _scale(form: CodesForm, bits: Any, dtype: Any) -> tuple[Any, ...]:
    """A scale, with the exponent that codes lack, twice in a word; of longer ones a second word has what is left."""
    if dtype == jnp.uint8:  # 2^(bits - 127) times 2^62 is bits + 62 where bfloat16's exponent stands
        shift = int(np.log2(_exponent(form)))
        exponent = arith.minui(arith.addi(bits, _int(shift)), _int(254))
        return (_twice(arith.shli(exponent, _int(7))),)
    if dtype == jnp.bfloat16 and form.unit == 1.0:
        return (_twice(bits),)
    value = _float32(bits, {jnp.bfloat16: ir.BF16Type, jnp.float16: ir.F16Type}.get(dtype.type, ir.F32Type).get())
    value = value if form.unit == 1.0 else arith.mulf(value, _float(_exponent(form)))
    high = _bfloat16(value)
    if dtype == jnp.bfloat16:
        return (_twice(high),)
    rest = arith.subf(value, arith.bitcast(ir.F32Type.get(), arith.shli(high, _int(16))))
    return _twice(high), _twice(_bfloat16(rest))


def _float32(bits: Any, kind: Any) -> Any:
    """A float whose bits stand low in a word."""
    if kind == ir.F32Type.get():
        return arith.bitcast(kind, bits)
    return arith.extf(ir.F32Type.get(), arith.bitcast(kind, arith.trunci(ir.IntegerType.get_signless(16), bits)))


def _zero(form: CodesForm, bits: Any) -> Any:
    """A zero point in the codes' unit, twice in a word."""
    if form.kind != "int4":
        return _twice(_bfloat16(arith.sitofp(ir.F32Type.get(), bits)))
    is_below = arith.cmpi(arith.CmpIPredicate.slt, bits, _int(0))
    size = arith.select(is_below, arith.subi(_int(0), bits), bits)
    return _twice(arith.ori(size, arith.select(is_below, _int(0x8000), _int(0))))


def _bfloat16(value: Any) -> Any:
    """The bits of a float32, rounded, in the low half of a word."""
    rounded = arith.bitcast(ir.IntegerType.get_signless(16), arith.truncf(ir.BF16Type.get(), value))
    return arith.extui(_i32(), rounded)


def _twice(bits: Any) -> Any:
    return utils.prmt(bits, bits, _int(0x1010))


def _two(instruction: str, a: Any, b: Any) -> Any:
    """An instruction on both halves of words."""
    return llvm.inline_asm(_i32(), [a, b], f"{instruction} $0, $1, $2;", "=r,r,r")


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a b + c of both halves of words, rounded once."""
    return llvm.inline_asm(_i32(), [a, b, c], "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r")


def _shifted(word: Any, left: int) -> Any:
    if left == 0:
        return word
    shift: Callable[..., Any] = arith.shli if left > 0 else arith.shrui
    return shift(word, _int(abs(left)))


def _place() -> tuple[Any, Any]:
    """A thread's first row of 64 and its quarter of a row."""
    thread = arith.remui(utils.thread_idx(), _int(128))
    warp, lane = arith.divui(thread, _int(32)), arith.remui(thread, _int(32))
    return arith.addi(arith.muli(warp, _int(16)), arith.divui(lane, _int(4))), arith.remui(lane, _int(4))


def _array(registers: list[Any], shape: tuple[int, int], *, is_signed: bool | None) -> Any:
    layout = mgpu.WGMMA_LAYOUT
    held = np.asarray(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=is_signed)


def _int(value: int) -> Any:
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value - 2**32 if value >= 2**31 else value))


def _float(value: float) -> Any:
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
