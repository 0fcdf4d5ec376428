"""Named cases of quantized_matmul: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.on_device import on_device
from pallas_kernels.quantized_matmul.weight import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """group: inputs that share a scale; None is all. The rest is as in QuantizedWeight."""

    name: str
    kind: str
    num_tokens: int = 16
    num_inputs: int = 64
    num_outputs: int = 48
    group: int | None = None
    has_zeros: bool = False
    has_order: bool = False
    activations: str | None = None
    activation_group: int | None = None
    has_power_scales: bool = False
    has_input_scale: bool = False
    scale_dtype: str = "float32"
    dtype: str = "float32"


CASES = (
    Case(name="w8a16", kind="int8"),
    Case(name="w8a16_groups", kind="int8", group=16, has_zeros=True, scale_dtype="bfloat16"),
    Case(name="w8a8", kind="int8", activations="int8"),
    Case(name="w8a8_one_row", kind="int8", activations="int8", num_tokens=1),
    Case(name="w8a8_static", kind="int8", activations="int8", has_input_scale=True, num_tokens=40),
    Case(name="w8a8_bfloat16", kind="int8", activations="int8", dtype="bfloat16", num_tokens=64),
    Case(name="w4a16", kind="int4", group=32, scale_dtype="bfloat16"),
    Case(name="w4a16_zeros_order", kind="int4", group=16, has_zeros=True, has_order=True, scale_dtype="float16"),
    Case(name="w4a16_channel", kind="int4", num_tokens=1),
    Case(name="w4a16_bfloat16", kind="int4", group=32, dtype="bfloat16", num_tokens=100),
    Case(name="fp8", kind="fp8_e4m3", activations="fp8_e4m3"),
    Case(name="fp8_weights", kind="fp8_e4m3"),
    Case(name="fp8_static", kind="fp8_e4m3", activations="fp8_e4m3", has_input_scale=True),
    Case(name="fp8_blocks", kind="fp8_e4m3", group=16, activations="fp8_e4m3", activation_group=16),
    Case(
        name="fp8_blocks_powers",
        kind="fp8_e4m3",
        group=16,
        activations="fp8_e4m3",
        activation_group=16,
        has_power_scales=True,
    ),
    Case(name="fp8_block_weights", kind="fp8_e4m3", group=16, dtype="bfloat16"),
    Case(name="mxfp4", kind="mxfp4", group=32, scale_dtype="uint8"),
)

_TPU: dict[str, Any] = {"num_inputs": 512, "num_outputs": 128, "dtype": "bfloat16"}
TPU_CASES = (  # of sizes that the TPU's kernels take
    Case(name="w8a16", kind="int8", **_TPU),
    Case(name="w8a16_groups", kind="int8", group=128, has_zeros=True, scale_dtype="bfloat16", **_TPU),
    Case(name="w8a8", kind="int8", activations="int8", num_tokens=5, **_TPU),
    Case(name="w8a8_static", kind="int8", activations="int8", has_input_scale=True, **_TPU),
    Case(name="w4a16", kind="int4", group=128, scale_dtype="bfloat16", **_TPU),
    Case(
        name="w4a16_zeros_order", kind="int4", group=32, has_zeros=True, has_order=True, scale_dtype="float16", **_TPU
    ),
    Case(name="w4a16_channel", kind="int4", num_tokens=1, **_TPU),
    Case(name="w4a16_large_groups", kind="int4", group=256, num_tokens=20, **_TPU),
    Case(name="fp8", kind="fp8_e4m3", activations="fp8_e4m3", **_TPU),
    Case(name="fp8_blocks", kind="fp8_e4m3", group=128, activations="fp8_e4m3", activation_group=128, **_TPU),
    Case(name="mxfp4", kind="mxfp4", group=32, scale_dtype="uint8", **_TPU),
)

_FEW: dict[str, Any] = {"num_tokens": 5, **_TPU}
GPU_CASES = (  # of sizes that the GPU's kernels take, with what those of a TPU have no form of their own for
    *(case for case in TPU_CASES if case.activations is None),
    Case(name="fp8_weights", kind="fp8_e4m3", **_TPU),
    Case(name="fp8_block_weights", kind="fp8_e4m3", group=128, num_tokens=9, **_TPU),
    Case(name="fp8_blocks", kind="fp8_e4m3", group=128, activations="fp8_e4m3", activation_group=128, **_FEW),
    Case(name="w4a8", kind="int4", group=128, activations="int8", **_TPU),
    Case(name="w8a8_zeros", kind="int8", has_zeros=True, activations="int8", **_TPU),
    Case(name="w4a16_half_a_chunk", kind="int4", group=64, scale_dtype="bfloat16", **_TPU),
    Case(
        name="w4a16_one_consumer",
        kind="int4",
        group=128,
        num_inputs=384,
        num_outputs=64,
        dtype="bfloat16",
        num_tokens=7,
    ),
)

_REAL: dict[str, Any] = {"num_inputs": 4096, "num_outputs": 4096, "dtype": "bfloat16"}
_FORMS: tuple[dict[str, Any], ...] = (
    {"name": "w4a16", "kind": "int4", "group": 128, "scale_dtype": "bfloat16"},
    {"name": "w8a8", "kind": "int8", "activations": "int8"},
    {"name": "fp8_blocks", "kind": "fp8_e4m3", "group": 128, "activations": "fp8_e4m3", "activation_group": 128},
    {"name": "w4a16_zeros", "kind": "int4", "group": 128, "has_zeros": True, "scale_dtype": "float16"},
    {"name": "w8a16", "kind": "int8"},
    {"name": "fp8", "kind": "fp8_e4m3", "activations": "fp8_e4m3"},
    {"name": "mxfp4", "kind": "mxfp4", "group": 32, "scale_dtype": "uint8"},
    {"name": "fp8_weights", "kind": "fp8_e4m3"},
)
REAL_CASES = tuple(  # of a decode step and of a prefill, for a check on a chip
    Case(num_tokens=num_tokens, **{**form, **_REAL, "name": f"{form['name']}_{num_tokens}_rows"})
    for num_tokens in (64, 512)
    for form in _FORMS
)


def make_arguments(case: Case, seed: int = 0) -> tuple[jnp.ndarray, QuantizedWeight]:
    """x and a weight drawn at random, with values about 1 / sqrt(I)."""
    rng = np.random.default_rng(seed)
    T, O, I = case.num_tokens, case.num_outputs, case.num_inputs
    scales = (O, I // (case.group or I))
    sizes = rng.uniform(0.5, 1, scales) / {"int8": 100, "int4": 6, "fp8_e4m3": 200, "mxfp4": 4}[case.kind] / I**0.5
    zeros = rng.integers(-20, 20, scales) if case.kind == "int8" else rng.integers(0, 16, scales)
    exponents = rng.integers(118, 123, scales)
    return on_device(rng.standard_normal((T, I)), case.dtype), QuantizedWeight(
        codes=_draw_codes(rng, case.kind, O, I),
        scales=on_device(exponents if case.scale_dtype == "uint8" else sizes, case.scale_dtype),
        zeros=on_device(zeros, "int16" if case.kind == "int8" else "int8") if case.has_zeros else None,
        order=on_device(rng.permutation(I), np.int32) if case.has_order else None,
        input_scale=on_device([0.02], np.float32) if case.has_input_scale else None,
        kind=case.kind,
        activations=case.activations,
        activation_group=case.activation_group,
        has_power_scales=case.has_power_scales,
    )


def _draw_codes(rng: np.random.Generator, kind: str, num_outputs: int, num_inputs: int) -> jnp.ndarray:
    if kind == "int8":
        return on_device(rng.integers(-128, 128, (num_outputs, num_inputs)), np.int8)
    if kind == "fp8_e4m3":
        return on_device(rng.uniform(-448, 448, (num_outputs, num_inputs)), jnp.float8_e4m3fn)
    return on_device(rng.integers(0, 256, (num_outputs, num_inputs // 2)), np.uint8)
