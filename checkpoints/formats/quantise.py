"""Quantising dense weights while they are loaded: each shard from the part of the weight that it needs, nothing twice.

    int8       code = w / scale, scale = max |w| over the inputs / 127
    fp8_e4m3   the same over 448
    int4       code = w / scale + 8, scale = max |w| over a group of inputs / 7, rounded to the dtype of scales first

Codes are rounded half to even. An output, or a group, of zeros has scale 1.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.formats.packed import Leaf, PackedWeight, Ranges, slices
from ferrum_jax.forms import WeightForm

_LARGEST = {"int8": 127, "fp8_e4m3": 448, "int4": 7}


def quantised(name: str, source: Any, form: WeightForm) -> PackedWeight:
    """The weight [.., out, in] that `source` is, in a form that can be made. Raises ValueError for other forms."""
    if form.kind not in _LARGEST or form.has_zeros or form.has_order or form.has_input_scale:
        raise ValueError(f"{name} is dense, and the model wants {form}; a published form cannot be made from it")
    shapes = form.leaves(tuple(source.shape))

    def rows(ranges: Ranges) -> np.ndarray:
        found = np.asarray(source[slices(ranges[:-1])]).astype(np.float32)
        if not np.isfinite(found).all():
            raise ValueError(f"{name} has weights that are not finite, which no scale stands for")
        return found

    def scales(ranges: Ranges) -> np.ndarray:
        return _scales(rows(ranges), form)[..., slices(ranges)[-1]]

    def codes(ranges: Ranges) -> np.ndarray:
        dense = rows(ranges)
        return _codes(dense, _scales(dense, form), form)[..., slices(ranges)[-1]]

    reads = {"codes": codes, "scales": scales}
    return PackedWeight(name, form, {leaf: Leaf(reads[leaf], *shapes[leaf]) for leaf in shapes})


def _scales(dense: np.ndarray, form: WeightForm) -> np.ndarray:
    """[.., out, groups], in the dtype of the form's scales."""
    groups = dense.reshape(*dense.shape[:-1], -1, form.group or dense.shape[-1])
    largest = np.max(np.abs(groups), axis=-1)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(_LARGEST[form.kind]))
    return np.maximum(scales, np.finfo(np.float32).tiny).astype(jnp.dtype(form.scale_dtype))


def _codes(dense: np.ndarray, scales: np.ndarray, form: WeightForm) -> np.ndarray:
    share = dense / np.repeat(scales.astype(np.float32), dense.shape[-1] // scales.shape[-1], axis=-1)
    if form.kind == "fp8_e4m3":
        return np.clip(share, -448, 448).astype(jnp.float8_e4m3fn)
    if form.kind == "int8":
        return np.clip(np.rint(share), -127, 127).astype(np.int8)
    nibbles = (np.clip(np.rint(share), -8, 7) + 8).astype(np.uint8)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4
