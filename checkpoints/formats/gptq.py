"""GPTQ of 4 and 8 bits, as AutoGPTQ (v1) and GPTQModel (v2) publish it.

    X.qweight [in * bits / 32, out] int32, codes packed along the inputs, lowest first
    X.qzeros  [in / group, out * bits / 32] int32, zero points, packed along the outputs; v1 has them less one
    X.scales  [in / group, out]      X.g_idx [in] int32, the group of each input

value[o, i] = (code[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]
Source: Frantar et al. 2022; AutoGPTQ's and GPTQModel's TorchQuantLinear, pack and dequantize.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.formats import leaves
from checkpoints.formats.packed import Leaf, PackedWeight, slices
from checkpoints.formats.scheme import Module, Scheme, Settings, fields_of, group_size
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import LIST, OBJECT, TRUTH, Known, one_of

_QWEIGHT, _QZEROS, _SCALES, _G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
_HOW = (
    *("quant_method", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "meta"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize", "module_name_preceding"),
    *("tokenizer", "dataset", "batch_size", "pad_token_id", "use_exllama", "exllama_config", "max_input_length"),
    *("disable_exllama", "use_cuda_fp16", "cache_block_outputs", "module_name_preceding_first_block", "backend"),
    *("cache_examples_on_gpu", "format", "pack_dtype", "quantizer", "version", "hyb_act", "is_marlin_format"),
    *("desc_act", "sym", "group_size", "bits", "lm_head", "modules_in_block_to_quantize"),
)
_VERSION = Known(one_of(None, "gptq", "gptq_v2"))
_FIELDS = fields_of(
    *_HOW,
    bits=Known(one_of(4, 8)),
    checkpoint_format=_VERSION,
    format=_VERSION,
    pack_dtype=Known(one_of("int32"), "int32"),
    is_marlin_format=Known(one_of(False), False),
    dynamic=Known(OBJECT, {}),
    lm_head=Known(TRUTH, False),
    modules_in_block_to_quantize=Known(LIST, []),
)


def scheme_from(settings: Settings, scale_dtype: str) -> Scheme:
    """The scheme of {"quant_method": "gptq"}."""
    said = settings.read(_FIELDS)
    form = _form(settings, settings.values, scale_dtype)
    versions = {said["checkpoint_format"], said["format"]} - {None}
    if len(versions) > 1:
        settings.refuse("checkpoint_format = {checkpoint_format!r} and format = {format!r}".format(**said))
    is_v1 = versions != {"gptq_v2"}
    overrides = []
    for name, values in said["dynamic"].items():
        if not isinstance(values, Mapping):
            settings.refuse(f"dynamic of {name!r}")
        changed = None if name.startswith("-:") else _form(settings, {**settings.values, **values}, scale_dtype)
        overrides.append((settings.pattern(name.removeprefix("-:").removeprefix("+:")), changed))
    blocks = said["modules_in_block_to_quantize"]
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in blocks):
        settings.refuse(f"modules_in_block_to_quantize = {blocks!r}"[:200])
    inside = {name for names in blocks for name in names}

    def form_of(module: str) -> WeightForm | None:
        if module == "lm_head" and not said["lm_head"]:
            return None
        if inside and not any(module.endswith(f".{name}") for name in inside):
            return None
        return next((own for pattern, own in overrides if pattern.match(module)), form)

    return Scheme(
        method="gptq",
        form_of=form_of,
        pack=lambda module: _pack(module, is_v1),
        marks=(_QWEIGHT, _QZEROS, _SCALES),
        others=(_G_IDX, ".weight"),
        has_head=said["lm_head"],
    )


def _form(settings: Settings, values: Mapping[str, Any], scale_dtype: str) -> WeightForm:
    for name in ("sym", "desc_act"):
        if not isinstance(values.get(name), bool | None):
            settings.refuse(f"{name} = {values[name]!r}"[:200])
    if values.keys() - settings.values.keys() - set(_HOW) or values["bits"] not in (4, 8):
        settings.refuse(f"dynamic = {settings.values.get('dynamic')!r}"[:200])
    group = group_size(settings, "group_size", values.get("group_size", 128))
    return WeightForm(
        kind="int4" if values["bits"] == 4 else "int8",
        group=group,
        scale_dtype=scale_dtype,
        has_zeros=not values.get("sym", True),
        has_order=bool(values.get("desc_act", False)) and group is not None,
    )


def _pack(module: Module, is_v1: bool) -> PackedWeight:
    form, tensors, base = module.form, module.tensors, module.name.removesuffix(".weight")
    bits, words = (4 if form.kind == "int4" else 8), leaves.words_of(module, _QWEIGHT, "[in, out] in words")
    shape = (words.shape[1], words.shape[0] * 32 // bits)
    groups = shape[1] // (form.group or shape[1])
    leaves.check_shape(module, _QZEROS, (groups, shape[0] * bits // 32), shape)
    leaves.check_shape(module, _SCALES, (groups, shape[0]), shape)
    leaves.check_words(tensors[_QZEROS], base + _QZEROS)
    order = _order(module, base, shape[1])

    def codes(outputs: range) -> np.ndarray:
        found = leaves.unpacked(np.asarray(words[:, slices((outputs,))[0]]).T, bits)
        return found if order is None or not form.has_order else found[:, order]

    parts = {
        "codes": (leaves.nibble_leaf if bits == 4 else leaves.byte_leaf)(codes, shape),
        "scales": leaves.scale_leaf(module, np.asarray(tensors[_SCALES]).T, base + _SCALES, shape),
    }
    zeros = _zeros(tensors[_QZEROS], bits, is_v1)
    if form.has_zeros:
        parts["zeros"] = _zero_leaf(zeros, bits)
    elif (zeros != 1 << (bits - 1)).any():
        odd = int(zeros[zeros != 1 << (bits - 1)][0])
        raise ValueError(
            f"{base}{_QZEROS} has {odd}; config.json says sym, with which it is {1 << (bits - 1)} everywhere"
        )
    if form.has_order and order is not None:
        parts["order"] = leaves.whole_leaf(lambda: order, order.shape, np.int32)
    return PackedWeight(module.name, form, parts)


def _order(module: Module, base: str, num_inputs: int) -> np.ndarray | None:
    """The inputs sorted by group; None without any. Raises ValueError where g_idx is not what config.json says."""
    form = module.form
    if _G_IDX not in module.tensors:
        if form.has_order:
            raise ValueError(f"{base}{_G_IDX} is missing, and config.json says desc_act; copy the checkpoint again")
        return None
    order = leaves.order_of(module.tensors[_G_IDX], base + _G_IDX, num_inputs, form.group or num_inputs)
    if not form.has_order and (order != np.arange(num_inputs)).any():
        raise ValueError(f"{base}{_G_IDX} orders the inputs, and config.json says that desc_act is false; correct it")
    return order


def _zeros(stored: Any, bits: int, is_v1: bool) -> np.ndarray:  # [groups, words] -> [out, groups] uint8
    found = leaves.unpacked(np.asarray(stored), bits).T
    return found + np.uint8(1) & np.uint8((1 << bits) - 1) if is_v1 else found


def _zero_leaf(zeros: np.ndarray, bits: int) -> Leaf:
    if bits == 4:
        return leaves.whole_leaf(lambda: zeros.astype(np.int8), zeros.shape, np.int8)
    return leaves.whole_leaf(lambda: zeros.astype(np.int16) - np.int16(128), zeros.shape, np.int16)
