"""Tiny models with quantised weights: their formats, written by the reference packers, and what they stand for.

compressed-tensors packs its own formats. AWQ, GPTQ and fp8 are written here, from their definitions.
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
from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]
GROUP, BLOCK = 32, 32
_COMPRESSORS = {
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
    "pack-quantized": PackedQuantizationCompressor,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised:
    """rounding: of a module's inputs, "int8" or "fp8", with scales of groups or one known beforehand.

    model: "dense", "experts" or "latent". not_rounded: ends of the names of modules whose inputs are not rounded.
    """

    config: Mapping[str, Any]
    pack: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
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


def _compress(kind: str, scheme: QuantizationScheme, weight: torch.Tensor, scale: float | None):
    """(stored tensors, decoded weight in float32) of a module."""
    args: Any = scheme.weights
    folded = weight
    if args.strategy == "group":
        folded = weight.unflatten(1, (-1, args.group_size))
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % rows))
        folded = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).transpose(1, 2).flatten(2)
    axes = {"tensor": (0, 1), "channel": (1,), "group": (2,), "block": (2,)}[args.strategy]
    low, high = folded.amin(axes, keepdim=True), folded.amax(axes, keepdim=True)
    scales, zeros = calculate_qparams(low.flatten(), high.flatten(), args)
    shape = low.shape[:2] if args.strategy in ("group", "block") else low.shape
    scales = scales.reshape(shape).to(torch.bfloat16)
    state = {
        "weight": weight.float(),
        "weight_scale": scales.float(),
        "weight_zero_point": zeros.reshape(shape).to(torch.int8),
    }
    stored = _COMPRESSORS[kind].compress(dict(state), scheme)
    if args.strategy == "block":  # what its own decoder wants padded
        spread = scales.float().repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
        decoded = stored["weight"].float() * spread
    else:
        decoded = _COMPRESSORS[kind].decompress({k: v.clone() for k, v in stored.items()}, scheme)["weight"]
    stored["weight_scale"] = scales if kind == "pack-quantized" else scales.float()
    if args.symmetric:
        stored.pop("weight_zero_point", None)
    if scale is not None:
        stored["input_scale"] = torch.tensor([scale], dtype=torch.float32)
    return stored, decoded


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
        pack=lambda module, weight: None if ignored(module) else _compress(kind, scheme, weight, scale),
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

    def pack(module: str, weight: torch.Tensor):
        if ignored(module):
            return None
        is_eight = ".self_attn." in module
        return _compress("int-quantized" if is_eight else "pack-quantized", eight if is_eight else four, weight, None)

    return Quantised(config=_published(group_0=("pack-quantized", four), group_1=("int-quantized", eight)), pack=pack)


# -- written here ------------------------------------------------------------------------------------------


def _rounded(weight: torch.Tensor, bits: int, *, symmetric: bool, groups: Any = None):
    """(codes [out, in], scales and zero points [out, groups], decoded): absmax or min-max by group of inputs."""
    groups = torch.arange(weight.shape[1]) // GROUP if groups is None else groups
    most, scales, zeros = 2**bits - 1, [], []
    for group in range(int(groups.max()) + 1):
        own = weight[:, groups == group]
        if symmetric:
            scales.append(own.abs().amax(1) * 2 / most)
            zeros.append(torch.full((len(weight),), 2 ** (bits - 1)))
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales.append((high - low) / most)
            zeros.append(torch.round(-low / scales[-1].half().float()).clamp(0, most))
    scale, zero = torch.stack(scales, 1).half(), torch.stack(zeros, 1).int()
    spread = scale.float()[:, groups]
    codes = (torch.round(weight / spread) + zero[:, groups]).clamp(0, most).int()
    return codes, scale, zero, (codes - zero[:, groups]).float() * spread


def _words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, m] codes as [n, m * bits / 32] int32; nibble k of a word is code order[k] of its run, or code k."""
    per = 32 // bits
    runs = codes.numpy().astype(np.uint32).reshape(len(codes), -1, per)
    runs = runs if order is None else runs[:, :, list(order)]
    shifts = np.arange(per, dtype=np.uint32) * bits
    return torch.from_numpy(np.bitwise_or.reduce(runs << shifts, axis=2).view(np.int32).copy())


def _gptq(bits: int, *, is_v1: bool, symmetric: bool, ordered: bool) -> Quantised:
    def pack(module: str, weight: torch.Tensor):
        if ignored(module):
            return None
        groups = torch.arange(weight.shape[1]) // GROUP
        if ordered:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(module)))]
        codes, scale, zero, decoded = _rounded(weight, bits, symmetric=symmetric, groups=groups)
        stored_zero = (zero - 1) % 2**bits if is_v1 else zero
        return {
            "qweight": _words(codes, bits).T.contiguous(),
            "qzeros": _words(stored_zero.T, bits),
            "scales": scale.T.contiguous(),
            "g_idx": groups.int(),
        }, decoded

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": symmetric}
    config |= {"lm_head": False, "damp_percent": 0.01, "checkpoint_format": "gptq" if is_v1 else "gptq_v2"}
    return Quantised(config=config, pack=pack)


def _awq(model: str) -> Quantised:
    def pack(module: str, weight: torch.Tensor):
        if ignored(module):
            return None
        codes, scale, zero, decoded = _rounded(weight, 4, symmetric=False)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        words = {"qweight": _words(codes.T, 4, order), "qzeros": _words(zero.T, 4, order)}
        return words | {"scales": scale.T.contiguous()}, decoded

    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return Quantised(config=config | {"modules_to_not_convert": ["mlp.gate"]}, pack=pack, model=model)


def _fp8(*, blocks: bool, model: str = "dense") -> Quantised:
    def pack(module: str, weight: torch.Tensor):
        if ignored(module):
            return None
        rows, columns = (BLOCK, BLOCK) if blocks else weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -weight.shape[0] % rows))
        largest = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).abs().amax((1, 3))
        scale = largest / 448
        spread = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = {"weight_scale_inv": scale} if blocks else {"weight_scale": scale.reshape(())}
        return {"weight": codes, **scales}, codes.float() * spread

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config |= {"weight_block_size": [BLOCK, BLOCK]} if blocks else {}
    if model != "latent":  # DeepSeek-V3 names none of its dense modules
        config |= {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}
    return Quantised(
        config=config,
        pack=pack,
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
