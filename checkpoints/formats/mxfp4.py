"""MXFP4, as gpt-oss is published: blocks of 32 four-bit floats with one scale each.

A checkpoint holds such a tensor X [.., in, out] as two of bytes, which lie along the inputs of each output:

    X_blocks  [.., out, in / 32, 16]   two E2M1 a byte (sign, exponent of 2 bits, fraction of 1), low half first
    X_scales  [.., out, in / 32]       E8M0: 2^(byte - 127), 255 is NaN

Source: Open Compute Project, OCP Microscaling Formats (MX) Specification v1.0, sections 5.2, 5.3.3, 5.4.1.
"""

from typing import Any

import numpy as np

from checkpoints.formats.leaves import checked_exponents
from checkpoints.formats.packed import Leaf, PackedWeight, slices, stored_leaf
from checkpoints.formats.scheme import Module, Scheme, Settings, fields_of, is_within
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import NAMES, Known

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # elements with one scale
FORM = WeightForm(kind="mxfp4", group=BLOCK, scale_dtype="uint8")

_FIELDS = fields_of("quant_method", "dequantize", "use_kernels", modules_to_not_convert=Known(NAMES, []))


def scheme_from(settings: Settings, scale_dtype: str) -> Scheme:
    """The scheme of {"quant_method": "mxfp4"}: experts are packed, all else is dense."""
    dense = frozenset(settings.read(_FIELDS)["modules_to_not_convert"])

    def form_of(module: str) -> WeightForm | None:
        return FORM if ".experts" in module and not is_within(dense, module) else None

    return Scheme(
        method="mxfp4",
        form_of=form_of,
        pack=pack,
        marks=(BLOCKS, SCALES),
        stands_for="",
        transposed=True,
    )


def pack(module: Module) -> PackedWeight:
    """The weight of a pair of blocks and scales. Raises ValueError where the two do not fit."""
    blocks, scales = module.tensors[BLOCKS], module.tensors[SCALES]
    name = module.name
    fits = blocks.dtype == scales.dtype == np.uint8 and tuple(blocks.shape) == (*scales.shape, BLOCK // 2)
    if not fits:
        raise ValueError(
            f"{name + BLOCKS} {list(blocks.shape)} and {name + SCALES} {list(scales.shape)} {scales.dtype} are no "
            f"MXFP4 tensor: blocks must be {[*scales.shape, BLOCK // 2]} and scales bytes; copy the checkpoint again"
        )
    codes = stored_leaf(_Joined(blocks))
    exponents = Leaf(
        lambda ranges: checked_exponents(np.asarray(scales[slices(ranges)]), name + SCALES), scales.shape, np.uint8
    )
    return PackedWeight(name, module.form, {"codes": codes, "scales": exponents}, outputs_last=True)


class _Joined:
    """Blocks [.., groups, 16] as [.., groups * 16]: leading axes are sliced where they are, the last one after it."""

    dtype = np.dtype(np.uint8)

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.shape = (*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1])

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        part = np.asarray(self._blocks[index[:-1]])
        return part.reshape(*part.shape[:-2], -1)[..., index[-1]]
