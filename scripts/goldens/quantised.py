"""Tiny models with quantised weights: what their formats store, drawn as codes and scales, and what that stands for.

compressed-tensors decodes its own formats. AWQ, GPTQ and fp8 are decoded here, from their definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from compressed_tensors.compressors.naive_quantized import (  # pyright: ignore[reportMissingImports]
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
)
from compressed_tensors.compressors.pack_quantized import (  # pyright: ignore[reportMissingImports]
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

from scripts.goldens.recipe import Said, normal, uniform

Tensors = dict[str, torch.Tensor]
Shape = tuple[int, int]
GROUP, BLOCK = 32, 32
_ZEROS = {4: (6, 9), 8: (96, 159)}
_DEVIATIONS = {4: 4.6, 8: 73.9, "float8": 112.0}  # of codes
_COMPRESSORS = {
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
    "pack-quantized": PackedQuantizationCompressor,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised:
    """stored: what is drawn for a module of [out, in] and a deviation of its weights. decode: that as float32 weights.

    rounding: of a module's inputs, "int8" or "fp8", with scales of groups or one known beforehand.

    model: "dense", "experts" or "latent". not_rounded: ends of the names of modules whose inputs are not rounded.
    """

    config: Mapping[str, Any]
    stored: Callable[[str, Shape, float], dict[str, Said]]
    decode: Callable[[str, Tensors, Shape], torch.Tensor]
    rounding: str | None = None
    group: int | None = None
    input_scale: float | None = None
    model: str = "dense"
    not_rounded: tuple[str, ...] = ()


def ignored(module: str) -> bool:
    """Heads and routers stay dense."""
    return module == "lm_head" or module.endswith(".mlp.gate")


def _published(**groups: tuple[str, QuantizationScheme]) -> dict[str, Any]:
    """As a config.json has it."""
    formats = {name for name, _ in groups.values()}
    for name, scheme in groups.values():
        scheme.format = name
    made = QuantizationConfig(
        config_groups={name: scheme for name, (_, scheme) in groups.items()},
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    return made.model_dump(mode="json", exclude={"run_compressed"}) | {"quant_method": "compressed-tensors"}


def _scales(shape: list[int], deviation: float, of_codes: float, dtype: str = "float32", **more: Any) -> Said:
    """What brings codes to the deviation that weights shall have."""
    middle = deviation / of_codes
    return {"dtype": dtype, "shape": shape, **uniform(0.6 * middle, 1.4 * middle), **more}


def _compressed(kind: str, scheme: QuantizationScheme, shape: Shape, deviation: float, scale: float | None):
    """What compressed-tensors stores of a module."""
    args: Any = scheme.weights
    (out, num_in), bits, stored = shape, args.num_bits, {}
    parts = {
        "tensor": lambda: [1, 1],
        "channel": lambda: [out, 1],
        "group": lambda: [out, num_in // args.group_size],
        "block": lambda: [-(-out // BLOCK), num_in // BLOCK],
    }[args.strategy]()
    if kind == "pack-quantized":
        stored["weight_packed"] = _words([out, num_in * bits // 32], bits)
        stored["weight_shape"] = {"dtype": "int64", "shape": [2], "values": [out, num_in]}
        stored["weight_scale"] = _scales(parts, deviation, _DEVIATIONS[bits], "bfloat16")
        if not args.symmetric:
            stored["weight_zero_point"] = _words([out * bits // 32, parts[1]], bits, *_ZEROS[bits])
    elif kind == "int-quantized":
        stored["weight"] = {
            "dtype": "int8",
            "shape": [out, num_in],
            "integers": [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1],
        }
        stored["weight_scale"] = _scales(parts, deviation, _DEVIATIONS[bits], through="bfloat16")
    else:
        stored["weight"] = _float8(shape)
        stored["weight_scale"] = _scales(parts, deviation, _DEVIATIONS["float8"], through="bfloat16")
    if scale is not None:
        stored["input_scale"] = {"dtype": "float32", "shape": [1], "values": [scale]}
    return stored


def _decompressed(kind: str, scheme: QuantizationScheme, tensors: Tensors, shape: Shape) -> torch.Tensor:
    args: Any = scheme.weights
    tensors = {name: x.clone() for name, x in tensors.items() if name != "input_scale"}
    tensors["weight_scale"] = tensors["weight_scale"].float()
    if args.strategy == "block":  # what its own decoder wants padded
        return tensors["weight"].float() * _spread(tensors["weight_scale"], shape, BLOCK, BLOCK)
    return _COMPRESSORS[kind].decompress(tensors, scheme)["weight"].float()


def _ct(
    kind: str, weights: dict, activations: dict | None = None, *, scale: float | None = None, **other: Any
) -> Quantised:
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    rounding = None if activations is None else "int8" if activations.get("type", "int") == "int" else "fp8"
    return Quantised(
        config=_published(group_0=(kind, scheme)),
        stored=lambda module, shape, deviation: _compressed(kind, scheme, shape, deviation, scale),
        decode=lambda module, tensors, shape: _decompressed(kind, scheme, tensors, shape),
        rounding=rounding,
        group=(activations or {}).get("group_size"),
        input_scale=scale,
        **other,
    )


def _mixed() -> Quantised:
    eight = QuantizationScheme(
        targets=["re:.*self_attn.*"], weights=QuantizationArgs(num_bits=8, strategy="channel", symmetric=True)
    )
    four = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
    )

    def form(module: str) -> tuple[str, QuantizationScheme]:
        return ("int-quantized", eight) if ".self_attn." in module else ("pack-quantized", four)

    return Quantised(
        config=_published(group_0=("pack-quantized", four), group_1=("int-quantized", eight)),
        stored=lambda module, shape, deviation: _compressed(*form(module), shape, deviation, None),
        decode=lambda module, tensors, shape: _decompressed(*form(module), tensors, shape),
    )


# -- decoded here ------------------------------------------------------------------------------------------


def _words(shape: list[int], bits: int, low: int = 0, high: int | None = None) -> Said:
    return {"dtype": "int32", "shape": shape, "words": [bits, low, 2**bits - 1 if high is None else high]}


def _float8(shape: Shape) -> Said:
    return {"dtype": "float8_e4m3fn", "shape": list(shape), **normal(0.0, _DEVIATIONS["float8"])}


def _codes(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] int32 as [n, m * 32 / bits] codes; part k of a word is code order[k] of its run, or code k."""
    per = 32 // bits
    parts = words.numpy().view(np.uint32)[:, :, None] >> (np.arange(per, dtype=np.uint32) * np.uint32(bits))
    parts = (parts & np.uint32(2**bits - 1)).astype(np.int64)
    parts = parts if order is None else parts[:, :, np.argsort(order)]
    return torch.from_numpy(parts.reshape(len(parts), -1))


def _spread(scales: torch.Tensor, shape: Shape, rows: int, columns: int) -> torch.Tensor:
    """Scales of blocks, for each weight."""
    return scales.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)


def _gptq(bits: int, *, is_v1: bool, symmetric: bool, ordered: bool) -> Quantised:
    def stored(module: str, shape: Shape, deviation: float) -> dict[str, Said]:
        out, num_in = shape
        low, high = (2 ** (bits - 1),) * 2 if symmetric else _ZEROS[bits]
        order: Said = {"groups": [GROUP], "name": f"order {len(module)}"}
        return {
            "qweight": _words([num_in * bits // 32, out], bits),
            "qzeros": _words([num_in // GROUP, out * bits // 32], bits, low - is_v1, high - is_v1),
            "scales": _scales([num_in // GROUP, out], deviation, _DEVIATIONS[bits], "float16"),
            "g_idx": {"dtype": "int32", "shape": [num_in]}
            | (order if ordered else {"values": [i // GROUP for i in range(num_in)]}),
        }

    def decode(module: str, tensors: Tensors, shape: Shape) -> torch.Tensor:
        codes = _codes(tensors["qweight"].T.contiguous(), bits)
        zeros = _codes(tensors["qzeros"], bits).T + is_v1
        groups = tensors["g_idx"].long()
        return (codes - zeros[:, groups]).float() * tensors["scales"].T.float()[:, groups]

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": symmetric}
    config |= {"lm_head": False, "damp_percent": 0.01, "checkpoint_format": "gptq" if is_v1 else "gptq_v2"}
    return Quantised(config=config, stored=stored, decode=decode)


def _awq(model: str) -> Quantised:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def stored(module: str, shape: Shape, deviation: float) -> dict[str, Said]:
        out, num_in = shape
        return {
            "qweight": _words([num_in, out // 8], 4),
            "qzeros": _words([num_in // GROUP, out // 8], 4, *_ZEROS[4]),
            "scales": _scales([num_in // GROUP, out], deviation, _DEVIATIONS[4], "float16"),
        }

    def decode(module: str, tensors: Tensors, shape: Shape) -> torch.Tensor:
        codes, zeros = (_codes(tensors[name], 4, order).T for name in ("qweight", "qzeros"))
        zeros, scales = (x.repeat_interleave(GROUP, 1) for x in (zeros, tensors["scales"].T.float()))
        return (codes - zeros).float() * scales

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config |= {"modules_to_not_convert": ["mlp.gate"]}
    return Quantised(config=config, stored=stored, decode=decode, model=model)


def _fp8(*, blocks: bool, model: str = "dense") -> Quantised:
    name = "weight_scale_inv" if blocks else "weight_scale"

    def stored(module: str, shape: Shape, deviation: float) -> dict[str, Said]:
        parts = [-(-shape[0] // BLOCK), shape[1] // BLOCK] if blocks else []
        return {"weight": _float8(shape), name: _scales(parts, deviation, _DEVIATIONS["float8"])}

    def decode(module: str, tensors: Tensors, shape: Shape) -> torch.Tensor:
        scales = tensors[name]
        return tensors["weight"].float() * (_spread(scales, shape, BLOCK, BLOCK) if blocks else scales)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": [BLOCK, BLOCK]} if blocks else {}
    if model != "latent":  # DeepSeek-V3 names none of its dense modules
        config |= {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}
    return Quantised(
        config=config,
        stored=stored,
        decode=decode,
        rounding="fp8",
        group=BLOCK if blocks else None,
        model=model,
        not_rounded=("kv_b_proj",),  # it is absorbed, so what it multiplies is not its published input
    )


_INT8 = {"num_bits": 8, "strategy": "channel", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_W4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {"num_bits": 8, "strategy": "tensor", "symmetric": True}
FORMATS: dict[str, Quantised] = {
    "w8a8": _ct("int-quantized", _INT8, _TOKEN),
    "w8a8_static": _ct("int-quantized", _INT8, _STATIC, scale=0.03),
    "w8a16": _ct("pack-quantized", _INT8),
    "w4a8": _ct("int-quantized", _W4 | {"symmetric": True}, _TOKEN),
    "w4a16": _ct("pack-quantized", _W4 | {"symmetric": True}),
    "w4a16_zeros": _ct("pack-quantized", _W4 | {"symmetric": False}),
    "mixed": _mixed(),
    "float8": _ct("float-quantized", _FP8 | {"strategy": "channel"}, _TOKEN | {"type": "float"}),
    "float8_static": _ct("float-quantized", _FP8 | {"strategy": "tensor"}, _STATIC | {"type": "float"}, scale=0.01),
    "float8_blocks": _ct(
        "float-quantized",
        _FP8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "dynamic": True, "symmetric": True},
    ),
    "fp8": _fp8(blocks=False),
    "fp8_blocks": _fp8(blocks=True),
    "gptq": _gptq(4, is_v1=True, symmetric=True, ordered=False),
    "gptq_v2_ordered": _gptq(4, is_v1=False, symmetric=False, ordered=True),
    "gptq_8_bits": _gptq(8, is_v1=True, symmetric=False, ordered=True),
    "awq": _awq("dense"),
    "w4a16_experts": _ct("pack-quantized", _W4 | {"symmetric": True}, model="experts"),
    "w8a8_experts": _ct("int-quantized", _INT8, _TOKEN, model="experts"),
    "fp8_blocks_experts": _fp8(blocks=True, model="experts"),
    "fp8_blocks_latent": _fp8(blocks=True, model="latent"),
    "awq_experts": _awq("experts"),
}
