"""The products that the Mosaic TPU kernels of quantized_matmul take, known before anything is compiled."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.target import Target

INPUTS, OUTPUTS = 256, 128  # multiples of them on one device
_EXPERTS_UNITS = 64, 64  # of experts in 4 bits with groups: their last chunk of inputs may be in part
_DEPTHS = (128, 256)  # inputs of one product of the matrix units
_LEAST_GROUP = 32
_BYTES_PER_INPUT, _SHARE_OF_ROWS = 2**10, 0.6  # 256 rows of bfloat16, twice


def refusals(weight: QuantizedWeight, dtype: jnp.dtype, target: Target) -> list[str]:
    """Every reason why 'mosaic_tpu' does not multiply x of a dtype with the weight, or shapes of it, of one device.

    weight: [O, I], or the experts of a device, [E, O, I].
    """
    reasons = []
    if not target.runs_tpu_kernels:
        reasons.append(f"{target.generation} is no TPU that kernels were made for")
    if dtype != jnp.bfloat16:
        reasons.append(f"activations are {jnp.dtype(dtype).name}; it takes bfloat16")
    outputs, inputs = weight.shape[-2:]
    of_inputs, of_outputs = _EXPERTS_UNITS if weight.ndim > 2 and _can_be_filled(weight) else (INPUTS, OUTPUTS)
    for name, size, unit in (("inputs", inputs, of_inputs), ("outputs", outputs, of_outputs)):
        if size % unit:
            reasons.append(f"{size} {name} of a device are no multiple of {unit}")
    if target.vmem_bytes is not None and inputs * _BYTES_PER_INPUT > target.vmem_bytes * _SHARE_OF_ROWS:
        reasons.append(
            f"rows of {inputs} inputs do not fit {target.generation}'s vector memory; spread them over devices"
        )
    group = inputs // weight.scales.shape[-1]
    if group != inputs and (group < _LEAST_GROUP or any(group % d and d % group for d in _DEPTHS)):
        reasons.append(f"a group has {group} inputs; it takes {_LEAST_GROUP} or more that fit into or fill {_DEPTHS}")
    if weight.activations == "int8" and weight.kind == "int8" and target.int8_ops_per_s is None:
        reasons.append(f"{target.generation} has no int8 product, which 'xla' makes exactly")
    if weight.ndim > 2:
        reasons += [f"experts have {what} each" for what, leaf in _of_experts(weight) if leaf is not None]
    return reasons


def form_class(kind: str, group: int | None, has_zeros: bool, activations: str | None) -> str:
    """The name of what the kernels are specialised to but for sizes; verdicts on them are kept by it."""
    is_exact = kind == activations == "int8" and group is None and not has_zeros
    parts = (kind, f"group={group or 'all'}", *(["zeros"] if has_zeros else []), *(["by int8"] if is_exact else []))
    return " ".join(parts)


def _can_be_filled(weight: QuantizedWeight) -> bool:
    """Whether what lies behind the last code is a number, so that zeros of x make nothing of it; E4M3 has NaN."""
    return weight.kind in ("int4", "mxfp4") and weight.scales.shape[-1] > 1


def _of_experts(weight: QuantizedWeight) -> tuple[tuple[str, object], ...]:
    return ("an order of inputs", weight.order), ("a scale of activations", weight.input_scale)
