"""fp8 with one scale for each block (DeepSeek, Qwen3), or for the tensor or each output.

    X.weight             [out, in] float8_e4m3fn
    X.weight_scale_inv   [out / rows, in / columns], with weight_block_size: what a code is multiplied by
    X.weight_scale       without: one number, or one for each output
    X.input_scale        where activation_scheme is static: of all activations

With scale_fmt "ue8m0" each token's own scales are rounded up to powers of two; those of weights are as they are stored,
in float32 or E8M0.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.3; keys as in transformers' fine-grained fp8 and in vLLM's fp8.
"""

from typing import Any

from checkpoints.formats.leaves import finite_leaf, float8, input_scale_leaf, scale_leaf
from checkpoints.formats.packed import PackedWeight, stored_leaf
from checkpoints.formats.scheme import NOTHING, Module, Scheme, Settings, fields_of, group_size, is_within
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import LIST, NAMES, Known, one_of

_BLOCK_SCALE, _SCALE, _INPUT = ".weight_scale_inv", ".weight_scale", ".input_scale"

_FIELDS = fields_of(
    *("quant_method", "is_checkpoint_fp8_serialized", "modules_to_convert"),
    fmt=Known(one_of("e4m3"), "e4m3"),
    activation_scheme=Known(one_of("dynamic", "static"), "dynamic"),
    scale_fmt=Known(one_of("float", "ue8m0"), "float"),
    weight_block_size=Known(LIST, []),
    modules_to_not_convert=Known(NAMES, []),
    ignored_layers=Known(NAMES, []),
    kv_cache_scheme=NOTHING,
    kv_cache_quant_method=NOTHING,
    dequantize=NOTHING,
)


def scheme_from(settings: Settings, scale_dtype: str) -> Scheme:
    """The scheme of {"quant_method": "fp8"}."""
    said = settings.read(_FIELDS)
    sizes = said["weight_block_size"]
    if sizes and len(sizes) != 2:
        settings.refuse(f"weight_block_size = {sizes!r}")
    rows, columns = (group_size(settings, "weight_block_size", size) for size in sizes or (-1, -1))
    is_static = said["activation_scheme"] == "static"
    dense = frozenset((*said["modules_to_not_convert"], *said["ignored_layers"]))
    form = WeightForm(
        kind="fp8_e4m3",
        group=columns,
        activations="fp8_e4m3",
        activation_group=None if is_static else columns,
        has_input_scale=is_static,
        has_power_scales=not is_static and said["scale_fmt"] == "ue8m0",
    )
    mark = _BLOCK_SCALE if sizes else _SCALE
    return Scheme(
        method="fp8",
        form_of=lambda module: None if is_within(dense, module) else form,
        pack=lambda module: _pack(module, mark, rows or 1),
        marks=(mark,),
        others=(".weight", _INPUT),
    )


def _pack(module: Module, mark: str, rows: int) -> PackedWeight:
    form, tensors, base = module.form, module.tensors, module.name.removesuffix(".weight")
    codes: Any = tensors.get(".weight")
    if codes is None or codes.dtype != float8() or len(codes.shape) != 2:
        what = "missing" if codes is None else f"{codes.dtype} {list(codes.shape)}"
        raise ValueError(f"{module.name} is {what}; beside {base}{mark} it must be float8_e4m3fn [out, in]")
    leaves = {
        "codes": finite_leaf(stored_leaf(codes), module.name),
        "scales": scale_leaf(module, tensors[mark], base + mark, tuple(codes.shape), rows),
    }
    if form.has_input_scale != (_INPUT in tensors):
        what = "is missing, and activation_scheme is static" if form.has_input_scale else "is there, and not static"
        raise ValueError(f"{base}{_INPUT} {what}; copy the checkpoint again")
    if form.has_input_scale:
        leaves["input_scale"] = input_scale_leaf(module, tensors[_INPUT], base + _INPUT)
    return PackedWeight(module.name, form, leaves)
