"""AWQ of 4 bits in its `gemm` version, as AutoAWQ publishes it.

    X.qweight [in, out / 8] int32, eight outputs a word in the order 0 2 4 6 1 3 5 7, lowest first
    X.qzeros  [in / group, out / 8] int32, packed alike      X.scales [in / group, out]

value[o, i] = (code[i, o] - zero[i // group, o]) * scale[i // group, o]
Source: Lin et al. 2023; AutoAWQ's WQLinear_GEMM.
"""

from typing import Any

import numpy as np

from checkpoints.formats.leaves import check_shape, check_words, nibble_leaf, scale_leaf, unpacked, whole_leaf, words_of
from checkpoints.formats.packed import PackedWeight
from checkpoints.formats.scheme import Module, Scheme, Settings, fields_of, group_size, is_within
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import ANY, NAMES, Known, one_of

_QWEIGHT, _QZEROS, _SCALES = ".qweight", ".qzeros", ".scales"
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble k of a word is output _ORDER[k]
_PLACES = np.argsort(_ORDER)  # the nibble of each output

_FIELDS = fields_of(
    *("quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "backend", "exllama_config"),
    bits=Known(one_of(4)),
    w_bit=Known(one_of(4), 4),
    version=Known(one_of("gemm", "GEMM"), "gemm"),
    zero_point=Known(one_of(True), True),
    group_size=Known(ANY),
    q_group_size=Known(ANY, 128),
    modules_to_not_convert=Known(NAMES, []),
)


def scheme_from(settings: Settings, scale_dtype: str) -> Scheme:
    """The scheme of {"quant_method": "awq"}."""
    said = settings.read(_FIELDS)
    size = said["q_group_size"] if said["group_size"] is None else said["group_size"]
    form = WeightForm(
        kind="int4", group=group_size(settings, "group_size", size), scale_dtype=scale_dtype, has_zeros=True
    )
    dense = frozenset(said["modules_to_not_convert"])
    return Scheme(
        method="awq",
        form_of=lambda module: None if module == "lm_head" or is_within(dense, module) else form,
        pack=_pack,
        marks=(_QWEIGHT, _QZEROS, _SCALES),
        others=(".weight",),
    )


def _pack(module: Module) -> PackedWeight:
    form, tensors, base = module.form, module.tensors, module.name.removesuffix(".weight")
    words = words_of(module, _QWEIGHT, "[in, out / 8]")
    shape = (words.shape[1] * 8, words.shape[0])
    groups = shape[1] // (form.group or shape[1])
    for end, size in ((_QZEROS, (groups, words.shape[1])), (_SCALES, (groups, shape[0]))):
        check_shape(module, end, size, shape)
    check_words(tensors[_QZEROS], base + _QZEROS)

    def codes(outputs: range) -> np.ndarray:
        first = outputs.start // 8 if outputs else 0
        found = _outputs(words[:, first : -(-outputs.stop // 8)])
        return found[slice(outputs.start - first * 8, outputs.stop - first * 8, outputs.step)]

    return PackedWeight(
        module.name,
        form,
        {
            "codes": nibble_leaf(codes, shape),
            "scales": scale_leaf(module, np.asarray(tensors[_SCALES]).T, base + _SCALES, shape),
            "zeros": whole_leaf(lambda: _outputs(tensors[_QZEROS]).astype(np.int8), (shape[0], groups), np.int8),
        },
    )


def _outputs(words: Any) -> np.ndarray:  # [n, w] int32 -> [8 w, n] uint8
    """Each output's codes."""
    nibbles = unpacked(np.asarray(words), 4)  # [n, 8 w]
    return nibbles.reshape(len(nibbles), -1, 8)[:, :, _PLACES].reshape(len(nibbles), -1).T
