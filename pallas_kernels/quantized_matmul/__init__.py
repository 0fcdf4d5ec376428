"""Matrix products with weights that are kept as codes and scales."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.activations import token_scales
from pallas_kernels.quantized_matmul.gpu.config import PART, CodesForm
from pallas_kernels.quantized_matmul.weight import QuantizedWeight, decode
from pallas_kernels.shapes import check_shapes
from pallas_kernels.target import Target

INPUTS, OUTPUTS = 256, 128  # multiples of them on one device
_EXPERTS_UNITS = 64, 64  # of experts in 4 bits with groups: their last chunk of inputs may be in part
_DEPTHS = (128, 256)  # inputs of one product of the matrix units
_MIN_GROUP = 32
BY_INT8 = "by int8"  # how the class of forms ends that are multiplied exactly
_BYTES_PER_INPUT, _SHARE_OF_ROWS = 2**10, 0.6  # 256 rows of bfloat16, twice
__all__ = [
    "BY_INT8",
    "QuantizedWeight",
    "decode",
    "form_class",
    "implementation_of",
    "quantized_matmul",
    "refusals",
    "token_scales",
]


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
    if group != inputs and (group < _MIN_GROUP or any(group % d and d % group for d in _DEPTHS)):
        reasons.append(f"a group has {group} inputs; it takes {_MIN_GROUP} or more that fit into or fill {_DEPTHS}")
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


def quantized_matmul(
    x: jax.Array,
    weight: QuantizedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    activation_scales: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:  # [T, O] out_dtype, x's when None
    """round(x) Wᵀ, where the weight stands for W [O, I], and round(x) is x unless the form rounds activations.

    x: [T, I], or [T, J] where the weight's order chooses I of J inputs. Accumulated in float32 or exactly; int8 by int8
    is exact, so its bits depend neither on companions nor on the number of rows. activation_scales: of `token_scales`,
    where x is a part of each token; by default those of x. implementation: None is "mosaic_tpu" where the weight names
    a TPU, which its kernels then are for, "mosaic_gpu" where it names a GPU, and else "xla".
    Raises ValueError for shapes that do not fit, for an unknown implementation and for a weight that it does not take.
    """
    leaves = [("O I", weight), ("O S", weight.scales)]
    leaves += [] if weight.zeros is None else [("O S", weight.zeros)]
    leaves += [("T I", x)] if weight.order is None else [("T J", x), ("I", weight.order)]
    sizes = check_shapes(*leaves)
    for name, count in (("groups of scales", sizes["S"]), ("activation_group", weight.activation_group or 1)):
        if sizes["I"] % count:
            raise ValueError(f"{name}, {count}, do not divide the {sizes['I']} inputs")
    kernels = implementation_of(weight.kernels)
    implementation = implementation or kernels
    dtype = jnp.dtype(out_dtype or x.dtype)
    if implementation == "xla":
        return xla.quantized_matmul(x, weight, dtype, activation_scales)
    if implementation not in ("mosaic_tpu", "mosaic_gpu"):
        raise ValueError(
            f"implementation is {implementation!r}; quantized_matmul has 'xla', 'mosaic_tpu', 'mosaic_gpu'"
        )
    if weight.kernels is None or implementation != kernels:
        named = implementation[-3:].upper()
        raise ValueError(
            f"implementation is {implementation!r}, and the weight names no {named}; give one as `kernels`"
        )
    if reasons := refusals(weight, x.dtype, weight.kernels):
        raise ValueError(f"{kernels!r} does not multiply this weight, take 'xla': {'; '.join(reasons)}")
    run: Any
    if kernels == "mosaic_gpu":  # imports that no other platform should pay for
        from pallas_kernels.quantized_matmul import mosaic_gpu as run
    else:
        from pallas_kernels.quantized_matmul import mosaic_tpu as run
    return run.quantized_matmul(x, weight, dtype, activation_scales)
