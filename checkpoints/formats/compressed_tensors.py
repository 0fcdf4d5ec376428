"""compressed-tensors, as vLLM's tools publish: int-quantized, float-quantized, pack-quantized.

    int-quantized, float-quantized   X.weight [out, in] int8 or float8, X.weight_scale, X.weight_zero_point; codes of
                                     four bits (W4A8) have a byte each
    pack-quantized                   X.weight_packed [out, words] int32, each code plus 2^(bits - 1), lowest first;
                                     X.weight_shape [2]; X.weight_scale; X.weight_zero_point [words, groups], packed
                                     along the outputs; X.weight_g_idx [in], the group of each input
    all                              X.input_scale, where activations have one scale that is known beforehand

Source: compressed-tensors 0.20, quantization/quant_args.py, compressors/pack_quantized, compressors/naive_quantized.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.formats import leaves
from checkpoints.formats.packed import Leaf, PackedWeight, Ranges, slices, stored_leaf
from checkpoints.formats.scheme import NOTHING, Module, Scheme, Settings, fields_of, group_size
from checkpoints.names.patterns import Pattern
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.error_text.known_fields import ANY, LIST, NAMES, OBJECT, TEXT, TRUTH, Known, one_of, whole

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_KINDS = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8_e4m3"}
_FIELDS = fields_of(
    *("quant_method", "version", "global_compression_ratio"),
    format=Known(one_of(None, *_FORMATS)),
    quantization_status=Known(one_of(None, "compressed")),
    sparsity_config=Known(OBJECT, {}),
    kv_cache_scheme=NOTHING,
    transform_config=NOTHING,
    config_groups=Known(OBJECT, {}),
    ignore=Known(NAMES, []),
)
_GROUP_FIELDS = fields_of(
    format=Known(one_of(None, *_FORMATS)),
    output_activations=NOTHING,
    targets=Known(NAMES, []),
    weights=Known(OBJECT, {}),
    input_activations=Known(OBJECT, {}),
)
_HOW = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
_SIZES = {"group_size": Known(ANY, 0), "block_structure": Known(LIST, [0, 0]), "strategy": Known(TEXT, "tensor")}
_WEIGHT_FIELDS = fields_of(
    *_HOW,
    **_SIZES | {"strategy": Known(one_of("tensor", "channel", "group", "block"))},
    type=Known(TEXT, "int"),
    num_bits=Known(whole(1), 8),
    dynamic=Known(one_of(False), False),
    actorder=Known(one_of(None, False, "weight", "static", "group", "dynamic", True)),
    symmetric=Known(TRUTH, True),
)
_ACTIVATION_FIELDS = fields_of(
    *_HOW,
    **_SIZES,
    type=Known(one_of("int", "float"), "int"),
    num_bits=Known(one_of(8)),
    dynamic=Known(TRUTH, False),
    actorder=Known(ANY),
    symmetric=Known(one_of(True), True),
)
_PACKED, _SCALE, _ZERO = ".weight_packed", ".weight_scale", ".weight_zero_point"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """One of config_groups. rows: outputs of a block, where a scale is a block's."""

    names: frozenset[str]
    patterns: tuple[Pattern, ...]
    form: WeightForm
    rows: int

    def rank(self, module: str) -> int | None:
        """How closely it names a module: by its name, a pattern, its class; None where it does not."""
        if module in self.names:
            return 0
        if any(pattern.match(module) for pattern in self.patterns):
            return 1
        return 2 if "Linear" in self.names else None


def scheme_from(settings: Settings, scale_dtype: str) -> Scheme:
    """The scheme of a config with config_groups. Raises ValueError for what is not supported, by name."""
    said = settings.read(_FIELDS)
    sparsity, ignored = said["sparsity_config"], said["ignore"]
    if sparsity.get("format", "dense") != "dense":
        settings.refuse(f"sparsity_config = {sparsity!r}")
    groups = [_group(settings, group, scale_dtype) for group in said["config_groups"].values()]
    if not groups:
        settings.refuse("no config_groups")
    patterns = tuple(settings.pattern(name[3:]) for name in ignored if name.startswith("re:"))

    def group_of(module: str) -> _Group | None:
        if module in ignored or any(pattern.match(module) for pattern in patterns):
            return None
        ranked = [(rank, i) for i, group in enumerate(groups) if (rank := group.rank(module)) is not None]
        return groups[min(ranked)[1]] if ranked else None

    def form_of(module: str) -> WeightForm | None:
        group = group_of(module)
        return None if group is None else group.form

    def pack(module: Module) -> PackedWeight:
        group = group_of(module.name.removesuffix(".weight"))
        assert group is not None
        return _pack(module, group.rows)

    return Scheme(
        method="compressed-tensors",
        form_of=form_of,
        pack=pack,
        marks=(_SCALE, _PACKED),
        others=(".weight", ".weight_shape", _ZERO, ".weight_g_idx", ".input_scale"),
        names_all=True,
        targets=tuple(name for group in groups for name in sorted(group.names) if name != "Linear"),
    )


def _group(settings: Settings, group: Any, scale_dtype: str) -> _Group:
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        settings.refuse(f"config_groups of {group!r}"[:200])
    own = Settings(group, settings.key, "compressed-tensors").read(_GROUP_FIELDS)
    targets = own["targets"]
    form, rows = _weights(Settings(own["weights"], settings.key, "compressed-tensors weights"), scale_dtype)
    if own["input_activations"]:
        rounding = Settings(own["input_activations"], settings.key, "compressed-tensors input_activations")
        form = dataclasses.replace(form, **_activations(rounding))
    patterns = tuple(settings.pattern(name[3:]) for name in targets if name.startswith("re:"))
    return _Group(names=frozenset(targets), patterns=patterns, form=form, rows=rows)


def _weights(settings: Settings, scale_dtype: str) -> tuple[WeightForm, int]:
    """The form, and the outputs of a block."""
    said = settings.read(_WEIGHT_FIELDS)
    kind, bits, strategy, rows, group = said["type"], said["num_bits"], said["strategy"], 1, None
    if (kind, bits) not in _KINDS:
        settings.refuse(f"{bits} bits of type {kind}")
    if strategy == "group":
        group = group_size(settings, "group_size", said["group_size"])
    if strategy == "block":
        sizes = said["block_structure"]
        rows, group = sizes if len(sizes) == 2 else (0, 0)
        rows, group = group_size(settings, "block_structure", rows), group_size(settings, "block_structure", group)
    form = WeightForm(
        kind=_KINDS[kind, bits],
        group=group,
        scale_dtype="float32" if kind == "float" else scale_dtype,
        has_zeros=not said["symmetric"],
        has_order=said["actorder"] in ("group", "dynamic", True) and group is not None,
    )
    return form, rows or 1


def _activations(settings: Settings) -> dict[str, Any]:
    """The fields of a form that describe activations."""
    said = settings.read(_ACTIVATION_FIELDS)
    strategy, dynamic = said["strategy"], said["dynamic"]
    if (strategy, dynamic) not in (("tensor", False), ("token", True), ("group", True)):
        settings.refuse(f"activations by {strategy}, dynamic = {dynamic}")
    group = None if strategy != "group" else group_size(settings, "group_size", said["group_size"])
    rounding = "int8" if said["type"] == "int" else "fp8_e4m3"
    return {"activations": rounding, "activation_group": group, "has_input_scale": not dynamic}


# -- tensors -----------------------------------------------------------------------------------------------


def _pack(module: Module, rows: int) -> PackedWeight:
    """The weight of a module's tensors. Raises ValueError where they do not fit one another."""
    form, tensors, base = module.form, module.tensors, module.name.removesuffix(".weight")
    shape, codes = _codes(module, base)
    parts = {"codes": codes, "scales": leaves.scale_leaf(module, _of(module, _SCALE), base + _SCALE, shape, rows)}
    if form.has_zeros:
        parts["zeros"] = _zeros(module, base, shape)
    if form.has_order:
        assert form.group is not None
        order = leaves.order_of(_of(module, ".weight_g_idx"), f"{base}.weight_g_idx", shape[1], form.group)
        parts["order"] = leaves.whole_leaf(lambda: order, order.shape, np.int32)
    if form.has_input_scale:
        parts["input_scale"] = leaves.input_scale_leaf(module, _of(module, ".input_scale"), f"{base}.input_scale")
    for end, is_known in (
        (_ZERO, form.has_zeros),
        (".weight_g_idx", form.has_order),
        (".input_scale", form.has_input_scale),
    ):
        if end in tensors and not is_known:
            raise ValueError(f"{base}{end} is there, and config.json says nothing of it; copy the checkpoint again")
    return PackedWeight(module.name, form, parts)


def _of(module: Module, end: str) -> Any:
    if end not in module.tensors:
        base = module.name.removesuffix(".weight")
        raise ValueError(f"{base}{end} is missing, which config.json says of {base}; copy the checkpoint again")
    return module.tensors[end]


def _codes(module: Module, base: str) -> tuple[tuple[int, int], Leaf]:
    """(shape of the weight, its codes)."""
    form, tensors = module.form, module.tensors
    if _PACKED not in tensors:
        stored = _of(module, ".weight")
        wanted = leaves.float8() if form.kind == "fp8_e4m3" else np.dtype(np.int8)
        if len(stored.shape) != 2 or stored.dtype != wanted or form.has_order:
            raise ValueError(
                f"{base}.weight is {stored.dtype} {list(stored.shape)}; config.json says codes of {form.kind}"
                + (", in an order of their own" if form.has_order else "")
            )
        return tuple(stored.shape), _a_byte_each(stored, f"{base}.weight", form.kind)
    if ".weight" in tensors:
        raise ValueError(f"{base} has .weight and .weight_packed, a dense weight and a quantised one; keep one of them")
    words, said = tensors[_PACKED], np.asarray(_of(module, ".weight_shape"))
    shape = tuple(said.reshape(-1).tolist())
    bits = {"int4": 4, "int8": 8}.get(form.kind, 0)
    fits = said.shape == (2,) and said.dtype.kind == "i" and words.dtype == np.int32 and bits
    if not fits or tuple(words.shape) != (shape[0], -(-shape[1] * bits // 32)):
        raise ValueError(
            f"{base}.weight_shape is {said.dtype} {list(shape)}, which contradicts {base}{_PACKED}, {words.dtype} "
            f"{list(words.shape)} of {form.kind}; copy the checkpoint again"
        )
    order = None
    if form.has_order and form.group:
        order = leaves.order_of(_of(module, ".weight_g_idx"), f"{base}.weight_g_idx", shape[1], form.group)

    def codes(outputs: range) -> np.ndarray:
        found = leaves.unpacked(np.asarray(words[slices((outputs,))]), bits)[:, : shape[1]]
        return found if order is None else found[:, order]

    if order is not None:
        return shape, (leaves.nibble_leaf if bits == 4 else leaves.byte_leaf)(codes, shape)
    return shape, _as_stored(words, shape, bits)


def _a_byte_each(stored: Any, name: str, kind: str) -> Leaf:
    """Codes that are not packed in the file."""
    if kind != "int4":
        return stored_leaf(stored) if kind == "int8" else leaves.finite_leaf(stored_leaf(stored), name)

    def codes(outputs: range) -> np.ndarray:
        return (_in_range(np.asarray(stored[slices((outputs,))]), 4, name, outputs) + np.int8(8)).view(np.uint8)

    return leaves.nibble_leaf(codes, tuple(stored.shape))


def _as_stored(words: Any, shape: tuple[int, int], bits: int) -> Leaf:
    """Codes in the order in which they lie: nibbles are a view of the file."""
    width = shape[1] * bits // 8

    def read(ranges: Ranges) -> np.ndarray:
        found = np.asarray(words[slices(ranges[:1])]).view(np.uint8)[:, :width][:, slices(ranges[1:])[0]]
        return found if bits == 4 else (found ^ 128).view(np.int8)

    return Leaf(read, (shape[0], width), np.uint8 if bits == 4 else np.int8)


def _in_range(codes: np.ndarray, bits: int, name: str, outputs: range | None = None) -> np.ndarray:
    """The codes or zero points of these outputs, checked. Raises ValueError for one that has more bits."""
    limit = 1 << (bits - 1)
    wrong = np.argwhere((codes < -limit) | (codes >= limit))
    if len(wrong):
        row, *others = wrong[0].tolist()
        place = [row if outputs is None else outputs[row], *others]
        raise ValueError(f"{name} is {codes[row, *others]} at {place}; with {bits} bits it is {-limit} to {limit - 1}")
    return codes


def _zeros(module: Module, base: str, shape: tuple[int, int]) -> Leaf:
    """[out, groups] zero points, unsigned as the codes of four bits are."""
    form, stored = module.form, _of(module, _ZERO)
    groups = 1 if form.group is None else shape[1] // form.group
    bits, dtype = (4, np.int8) if form.kind == "int4" else (8, np.int16)
    packed = stored.dtype == np.int32
    wanted = (-(-shape[0] * bits // 32), groups) if packed else (shape[0], groups)
    if tuple(stored.shape) != wanted:
        raise ValueError(f"{base}{_ZERO} is {list(stored.shape)}; zero points of {list(shape)} are {list(wanted)} here")

    middle = 8 if bits == 4 else 0  # what codes on the device are more
    if not packed and stored.dtype not in (np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int64)):
        raise ValueError(f"{base}{_ZERO} is {stored.dtype}; zero points are whole numbers: copy the checkpoint again")

    def zeros() -> np.ndarray:
        if not packed:  # signed, as codes are before they are packed
            return _in_range(np.asarray(stored), bits, base + _ZERO).astype(dtype) + dtype(middle)
        found = leaves.unpacked(np.asarray(stored).T, bits).T[: shape[0]].astype(dtype)
        return found if bits == 4 else found - 128

    return leaves.whole_leaf(zeros, (shape[0], groups), dtype)
