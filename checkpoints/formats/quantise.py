"""Quantising dense weights while they are loaded: each shard from the part of the weight that it needs, nothing twice.

    int8       code = w / scale, scale = max |w| over the inputs / 127
    fp8_e4m3   the same over 448
    int4       code = w / scale + 8, scale = max |w| over a group of inputs / 7, rounded to the dtype of scales first
    mxfp4      scale = 2^(floor(log2 max |w|) - 2) over 32 inputs; what is beyond 6 times that becomes 6

Codes are rounded half to even. An output, or a group, of zeros has scale 1.
Source of mxfp4: OCP Microscaling Formats (MX) Specification v1.0, section 6.3.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.formats.packed import Leaf, PackedWeight, Ranges, slices
from checkpoints.stored_weight import WeightForm

_LARGEST = {"int8": 127, "fp8_e4m3": 448, "int4": 7, "mxfp4": 4}  # of mxfp4 the largest power of two
_BIAS = 127  # of E8M0
_RUN = 1 << 22  # weights that are quantised at once: what is in memory beside the leaves is a few times as many floats
_E2M1 = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), np.float32)


def quantised(name: str, source: Any, form: WeightForm) -> PackedWeight:
    """The weight [.., out, in] that `source` is, in a form that can be made. Raises ValueError for other forms."""
    if form.kind not in _LARGEST or form.has_zeros or form.has_order or form.has_input_scale:
        raise ValueError(f"{name} is dense, and the model wants {form}; a published form cannot be made from it")
    shapes = form.leaves(tuple(source.shape))

    def rows(ranges: Ranges) -> np.ndarray:
        found = np.asarray(source[slices(ranges[:-1])]).astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError(f"{name} has weights that are not finite; no scale can represent them")
        return found

    def read(leaf: str, ranges: Ranges) -> np.ndarray:
        """The leaf of all inputs, a run of outputs at a time, then those inputs that are asked for."""
        *lead, outputs, inputs = ranges
        (*_, width), dtype = shapes[leaf]
        found = np.empty((*map(len, lead), len(outputs), width), jnp.dtype(dtype))
        run = max(1, _RUN // max(1, math.prod(map(len, lead)) * source.shape[-1]))
        for start in range(0, len(outputs), run):
            dense = rows((*lead, outputs[start : start + run], inputs))
            scales = _scales(dense, form)
            found[..., start : start + run, :] = scales if leaf == "scales" else _codes(dense, scales, form)
        return found[..., slices(ranges)[-1]]

    leaves = {leaf: Leaf(functools.partial(read, leaf), *shapes[leaf]) for leaf in shapes}
    return PackedWeight(name, form, leaves)


def _scales(dense: np.ndarray, form: WeightForm) -> np.ndarray:
    """[.., out, groups], in the dtype of the form's scales."""
    groups = dense.reshape(*dense.shape[:-1], -1, form.group or dense.shape[-1])
    largest = np.max(np.abs(groups), axis=-1)
    if form.kind == "mxfp4":
        exponents = np.frexp(np.where(largest == 0, np.float32(4), largest))[1] - 3  # floor(log2) - 2
        return (np.clip(exponents, -_BIAS, _BIAS) + _BIAS).astype(np.uint8)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[form.kind]))
    return np.maximum(scales, np.finfo(np.float32).tiny).astype(jnp.dtype(form.scale_dtype))


def _codes(dense: np.ndarray, scales: np.ndarray, form: WeightForm) -> np.ndarray:
    numbers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS) if form.kind == "mxfp4" else scales
    share = dense / np.repeat(numbers.astype(np.float32), dense.shape[-1] // scales.shape[-1], axis=-1)
    if form.kind == "fp8_e4m3":
        return np.clip(share, -448, 448).astype(jnp.float8_e4m3fn)
    if form.kind == "int8":
        return np.clip(np.rint(share), -127, 127).astype(np.int8)
    nibbles = _e2m1(share) if form.kind == "mxfp4" else (np.clip(np.rint(share), -8, 7) + 8).astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def _e2m1(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest 0, 0.5, 1, 1.5, 2, 3, 4, 6 of either sign, those of a tie with an even code."""
    size = np.minimum(np.abs(values), 6)
    step = np.where(size < 2, 0.5, np.where(size < 4, 1.0, 2.0)).astype(np.float32)
    nearest = np.rint(size / step) * step  # half to even of a step is the even code
    code = np.searchsorted(_E2M1, nearest).astype(np.uint8)
    return code | np.signbit(values).astype(np.uint8) << 3
