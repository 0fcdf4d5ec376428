"""The products that the kernels of quantized_matmul take, known before anything is compiled."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.quantized_matmul.gpu.config import PART, CodesForm
from pallas_kernels.quantized_matmul.weight import QuantizedWeight
from pallas_kernels.target import Target

INPUTS, OUTPUTS = 256, 128  # multiples of them on one device
_EXPERTS_UNITS = 64, 64  # of experts in 4 bits with groups: their last chunk of inputs may be in part
_DEPTHS = (128, 256)  # inputs of one product of the matrix units
_LEAST_GROUP = 32
BY_INT8 = "by int8"  # how the class of forms ends that are multiplied exactly
_BYTES_PER_INPUT, _SHARE_OF_ROWS = 2**10, 0.6  # 256 rows of bfloat16, twice


def implementation_of(target: Target | None) -> str:
    """The implementation that a target's kernels are of, "xla" where there is none."""
    if target is None:
        return "xla"
    return "mosaic_gpu" if target.platform == "gpu" else "mosaic_tpu"


def refusals(weight: QuantizedWeight, dtype: jnp.dtype, target: Target) -> list[str]:
    """Every reason why a target's kernels do not multiply x of a dtype with the weight, or shapes of it, of one device.

    weight: [O, I], or the experts of a device, [E, O, I].
    """
    if target.platform == "gpu":
        return _gpu_refusals(weight, dtype, target)
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


def _gpu_refusals(weight: QuantizedWeight, dtype: jnp.dtype, target: Target) -> list[str]:
    reasons, (outputs, inputs) = [], weight.shape[-2:]
    form = CodesForm(kind=weight.kind, num_inputs=inputs, num_groups=weight.scales.shape[-1], has_zeros=False)
    if target.num_cores is None:
        reasons.append(f"{target.generation} is no Hopper GPU, which 'mosaic_gpu' is made for")
    if dtype != jnp.bfloat16:
        reasons.append(f"activations are {jnp.dtype(dtype).name}; it takes bfloat16")
    for name, size, unit in (("inputs", inputs, form.chunk), ("outputs", outputs, PART)):
        if size % unit:
            reasons.append(f"{size} {name} of a device are no multiple of {unit}")
    group, chunk = form.group, form.chunk
    if group != inputs and (group % form.quarter or (group % chunk and chunk % group)):
        reasons.append(
            f"a group has {group} inputs; it takes multiples of {form.quarter} that fit into or fill {chunk}"
        )
    if weight.activations is not None and form.num_groups == 1 and weight.activation_group in (None, inputs):
        by_xla = {"int8": "int8 by int8 is exact in 'xla'", "fp8_e4m3": "'xla' multiplies float8 by float8 in 8 bits"}
        if weight.kind == weight.activations and weight.zeros is None:
            reasons.append(by_xla[weight.kind])
    if weight.ndim > 2:
        reasons += [f"experts have {what} each" for what, leaf in _of_experts(weight) if leaf is not None]
    return reasons


def form_class(kind: str, group: int | None, has_zeros: bool, activations: str | None) -> str:
    """The name of what the kernels are specialised to but for sizes; verdicts on them are kept by it."""
    is_exact = kind == activations == "int8" and group is None and not has_zeros
    parts = (kind, f"group={group or 'all'}", *(["zeros"] if has_zeros else []), *([BY_INT8] if is_exact else []))
    return " ".join(parts)


def _can_be_filled(weight: QuantizedWeight) -> bool:
    """Whether what lies behind the last code is a number, so that zeros of x make nothing of it; E4M3 has NaN."""
    return weight.kind in ("int4", "mxfp4") and weight.scales.shape[-1] > 1


def _of_experts(weight: QuantizedWeight) -> tuple[tuple[str, object], ...]:
    return ("an order of inputs", weight.order), ("a scale of activations", weight.input_scale)
