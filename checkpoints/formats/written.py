"""Forms as they are published: MXFP4 as gpt-oss has it, every other one as compressed-tensors.

The inverse of the readers beside this file: the same codes and values. What compressed-tensors cannot say is refused
by name.
"""

import collections
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.formats import mxfp4
from checkpoints.stored_weight import WeightForm
from ferrum_jax.io.ints import ceil_div, round_up

Arrays = Mapping[str, np.ndarray]
_BITS = {"int8": 8, "int4": 4, "fp8_e4m3": 8}


def tensors_of(name: str, form: WeightForm, leaves: Arrays, rows: int = 1) -> dict[str, np.ndarray]:
    """{name: tensor} of a module that stands for the weight `name`, given its leaves [.., out, ..].

    rows: outputs of a block, where a scale is that of a block. Raises ValueError for zero points that do not fit.
    """
    if form.kind == "mxfp4":
        codes = leaves["codes"]
        blocks = codes.reshape(*codes.shape[:-1], -1, mxfp4.BLOCK // 2)
        return {name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: leaves["scales"]}
    base, codes = name.removesuffix(".weight"), leaves["codes"]
    found = {f"{base}.weight_scale": leaves["scales"][::rows]}
    if _file_format(form) == "pack-quantized":
        found |= {f"{base}.{end}": tensor for end, tensor in _packed(name, form, leaves).items()}
    else:
        found[f"{base}.weight"] = _nibbles(codes).view(np.int8) - np.int8(8) if form.kind == "int4" else codes
    if form.has_input_scale:
        found[f"{base}.input_scale"] = leaves["input_scale"]
    return found


def shapes_of(
    name: str, form: WeightForm, shape: tuple[int, ...], rows: int = 1
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of the tensors that `tensors_of` makes of a weight of this shape, as it stands in the source."""
    if form.kind == "mxfp4":
        *lead, num_in, num_out = shape
        groups = (*lead, num_out, num_in // mxfp4.BLOCK)
        byte = np.dtype(np.uint8)
        return {name + mxfp4.BLOCKS: ((*groups, mxfp4.BLOCK // 2), byte), name + mxfp4.SCALES: (groups, byte)}
    if len(shape) != 2:
        raise ValueError(
            f"{name} is one tensor of {shape[0]} experts, which compressed-tensors has no quantised form for; "
            "convert the dense checkpoint without --weights, and quantise with weights= where it is loaded"
        )
    if form.has_power_scales:
        raise ValueError(
            f"{name} rounds activations by scales that are powers of two, which compressed-tensors has no word for; "
            "keep the checkpoint that it was converted from"
        )
    base, (num_out, num_in), bits = name.removesuffix(".weight"), shape, _BITS[form.kind]
    groups, words = num_in // (form.group or num_in), np.dtype(np.int32)
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "weight_scale": ((ceil_div(num_out, rows), groups), jnp.dtype(form.scale_dtype))
    }
    if _file_format(form) != "pack-quantized":
        found["weight"] = (shape, jnp.dtype(jnp.float8_e4m3fn if form.kind == "fp8_e4m3" else jnp.int8))
    else:
        found["weight_packed"] = ((num_out, ceil_div(num_in * bits, 32)), words)
        found["weight_shape"] = ((2,), np.dtype(np.int64))
        found |= {"weight_zero_point": ((ceil_div(num_out * bits, 32), groups), words)} if form.has_zeros else {}
        found |= {"weight_g_idx": ((num_in,), words)} if form.has_order else {}
    found |= {"input_scale": ((1,), np.dtype(np.float32))} if form.has_input_scale else {}
    return {f"{base}.{end}": own for end, own in found.items()}


def block_rows(form: WeightForm, scales: np.ndarray) -> int:
    """Outputs of a block, as many as it has inputs, where all of them share their scales [out, groups]; else 1."""
    rows = form.group if form.kind == "fp8_e4m3" and form.group else 1
    return rows if np.array_equal(np.repeat(scales[::rows], rows, axis=0)[: len(scales)], scales) else 1


def quantization_config(modules: Mapping[str, tuple[WeightForm, int]], dense: Collection[str]) -> dict[str, Any]:
    """config.json's description of modules {name: (form, outputs of a block)}. dense: names of other modules."""
    by_form: dict[tuple[WeightForm, int], list[str]] = collections.defaultdict(list)
    for name, own in modules.items():
        by_form[own].append(name)
    most = max(by_form, key=lambda own: len(by_form[own]))  # the others are named one by one
    groups = {
        f"group_{i}": _group(*own, targets=["Linear"] if own == most else sorted(by_form[own]))
        for i, own in enumerate(by_form)
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(dense),
    }


def _file_format(form: WeightForm) -> str:
    if form.kind == "fp8_e4m3":
        return "float-quantized"
    is_plain = not (form.has_zeros or form.has_order) and (form.kind == "int4" or form.group is None)
    return "int-quantized" if is_plain and form.activations == "int8" else "pack-quantized"


def _group(form: WeightForm, rows: int, targets: list[str]) -> dict[str, Any]:
    kind = "float" if form.kind == "fp8_e4m3" else "int"
    weights: dict[str, Any] = {
        "num_bits": _BITS[form.kind],
        "type": kind,
        "symmetric": not form.has_zeros,
        "strategy": "channel" if form.group is None else "group" if rows == 1 else "block",
        "dynamic": False,
    }
    weights |= {"group_size": form.group} if form.group is not None and rows == 1 else {}
    weights |= {"block_structure": [rows, form.group]} if rows > 1 else {}
    weights |= {"actorder": "group"} if form.has_order else {}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _activations(form),
        "output_activations": None,
        "format": _file_format(form),
    }


def _activations(form: WeightForm) -> dict[str, Any] | None:
    if form.activations is None:
        return None
    found: dict[str, Any] = {"num_bits": 8, "type": "int" if form.activations == "int8" else "float", "symmetric": True}
    if form.has_input_scale:
        return found | {"strategy": "tensor", "dynamic": False}
    if form.activation_group is None:
        return found | {"strategy": "token", "dynamic": True}
    return found | {"strategy": "group", "dynamic": True, "group_size": form.activation_group}


def _packed(name: str, form: WeightForm, leaves: Arrays) -> dict[str, np.ndarray]:
    """Codes and zero points as words, unsigned, lowest first: those along the inputs, these along the outputs."""
    bits = _BITS[form.kind]
    codes = _unsigned(leaves["codes"], bits)
    found = {}
    if form.has_order:
        order = leaves["order"]
        placed = np.empty_like(codes)
        placed[:, order] = codes
        codes, g_idx = placed, np.empty(len(order), np.int32)
        g_idx[order] = np.arange(len(order)) // (form.group or len(order))
        found["weight_g_idx"] = g_idx
    if form.has_zeros:
        zeros = leaves["zeros"].astype(np.int32) + (128 if bits == 8 else 0)
        wrong = np.argwhere((zeros < 0) | (zeros >= 1 << bits))
        if len(wrong):
            place = wrong[0].tolist()
            raise ValueError(
                f"{name} has zero point {leaves['zeros'][tuple(place)]} at {place}, and compressed-tensors "
                f"holds {bits} bits of it; keep the checkpoint that it was converted from"
            )
        found["weight_zero_point"] = _words(np.ascontiguousarray(zeros.astype(np.uint8).T), bits).T
    return found | {
        "weight_packed": _words(codes, bits),
        "weight_shape": np.array(codes.shape, np.int64),
    }


def _unsigned(codes: np.ndarray, bits: int) -> np.ndarray:  # of the device -> [out, in] uint8
    if bits == 8:
        return codes.view(np.uint8) ^ 128
    return _nibbles(codes)


def _nibbles(codes: np.ndarray) -> np.ndarray:  # [out, in / 2] uint8 -> [out, in]
    return np.stack((codes & 15, codes >> 4), axis=-1).reshape(len(codes), -1)


def _words(codes: np.ndarray, bits: int) -> np.ndarray:  # [n, m] uint8 -> [n, words] int32, the last filled with zeros
    per = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, round_up(codes.shape[1], per) - codes.shape[1])))
    joined = padded if bits == 8 else padded[:, 0::2] | padded[:, 1::2] << 4
    return np.ascontiguousarray(joined).view(np.int32)
