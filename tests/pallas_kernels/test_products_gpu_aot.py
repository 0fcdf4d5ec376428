"""Products of real sizes, compiled for an H200 that is not here: none spills, and no weight is decoded into memory."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ferrum_jax.models.families.registry import quantised_spec, spec_of
from pallas_kernels.grouped_matmul import ExpertStack, expert_mlp
from pallas_kernels.quantized_matmul import QuantizedWeight, mosaic_gpu, quantized_matmul, refusals
from pallas_kernels.quantized_matmul.gpu.config import ProductTiles
from scripts import gpu_static
from scripts.published import config_of
from tests.pallas_kernels.test_paged_attention_gpu_aot import whole_steps

pytestmark = pytest.mark.aot
BFLOAT16 = jnp.dtype(jnp.bfloat16)
CODES = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}
FORMS: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128, "scales": jnp.bfloat16},
    "awq": {"kind": "int4", "group": 128, "scales": jnp.float16, "zeros": jnp.int8},
    "mxfp4": {"kind": "mxfp4", "group": 32, "scales": jnp.uint8},
    "int8": {"kind": "int8", "group": None, "scales": jnp.float32},
    "fp8_blocks": {"kind": "fp8_e4m3", "group": 128, "scales": jnp.float32},
}


def weight_of(shape: tuple[int, ...], *, kind: str, group: int | None, scales: Any, zeros: Any = None, **rest: Any):
    *lead, inputs = shape
    groups = (*lead, inputs // (group or inputs))
    width = inputs if kind in CODES else inputs // 2
    return QuantizedWeight(
        codes=jax.ShapeDtypeStruct((*lead, width), CODES.get(kind, jnp.uint8)),
        scales=jax.ShapeDtypeStruct(groups, scales),
        zeros=None if zeros is None else jax.ShapeDtypeStruct(groups, zeros),
        kind=kind,
        kernels=gpu_static.TARGET,
        **rest,
    )


def products_of(name: str) -> Iterator[tuple[int, int]]:
    """[outputs, inputs] of the dense products of a layer."""
    config = config_of(name)
    D, N = config["hidden_size"], config["num_attention_heads"]
    if "q_lora_rank" in config:
        nope, rope, v = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
        Q, L = config["q_lora_rank"], config["kv_lora_rank"]
        yield from ((Q, D), (N * (nope + rope), Q), (L + rope, D), (N * (nope + v), L), (D, N * v))
    else:
        H = config.get("head_dim") or D // N
        yield from ((N * H, D), (config["num_key_value_heads"] * H, D), (D, N * H))
    F = config["moe_intermediate_size"] if name == "Qwen3-30B-A3B" else config["intermediate_size"]
    yield from ((F, D), (D, F))


SHAPES = {name: sorted(set(products_of(name))) for name in ("Llama-3-8B", "Qwen3-30B-A3B", "DeepSeek-V3")}


def compiled_product(rows: int, weight: Any) -> gpu_static.Compiled:
    x = jax.ShapeDtypeStruct((rows, weight.shape[-1]), jnp.bfloat16)
    assert refusals(weight, x.dtype, gpu_static.TARGET) == []
    return gpu_static.compile_for_h200(quantized_matmul, x, weight)


def check(compiled: gpu_static.Compiled, weight: Any) -> None:
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    text = compiled.executable.as_text()
    size = ",".join(map(str, weight.shape[-2:]))
    assert "mosaic_gpu" in text and not re.search(rf"(bf16|f32|f16)\[(\d+,)?{size}\]", text)
    # a part of another array begins anywhere, and a GPU's runtime refuses it as a kernel's operand
    assert "dynamic-slice-fusion" not in text


def test_64_tokens_by_outputs_in_threes_do_not_spill() -> None:
    """kv_a of DeepSeek-V3: 576 outputs are three times 192, so up to six warpgroups would share the registers."""
    weight = weight_of((576, 7168), **FORMS["fp8_blocks"], activations="fp8_e4m3", activation_group=128)
    check(compiled_product(64, weight), weight)


@pytest.mark.parametrize("rows", [1, 16, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMS)
def test_codes_of_every_form_are_decoded_in_registers_that_suffice(name: str, rows: int) -> None:
    weight = weight_of((14336, 4096), **FORMS[name])
    compiled = compiled_product(rows, weight)
    check(compiled, weight)
    tiles = ProductTiles.choose(rows, 14336, mosaic_gpu.form_of(weight), gpu_static.TARGET)
    assert compiled.shared_bytes <= tiles.smem_bytes <= (gpu_static.TARGET.smem_bytes or 0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 640])
@pytest.mark.parametrize("model", SHAPES)
def test_every_product_of_a_model_is_compiled_for_its_codes(model: str, rows: int) -> None:
    form = FORMS["fp8_blocks" if model == "DeepSeek-V3" else "int4"]
    for shape in SHAPES[model]:
        weight = weight_of(shape, **form)
        check(compiled_product(rows, weight), weight)


@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_experts_are_decoded_in_registers_too(name: str) -> None:
    E, F, D, X, rows = 128, 768, 2048, 8, 64
    gate, up, down = (weight_of((E, *shape), **FORMS[name]) for shape in ((F, D), (F, D), (D, F)))
    shapes = [
        jax.ShapeDtypeStruct(size, dtype)
        for size, dtype in (((rows, D), jnp.bfloat16), ((rows, X), jnp.int32), ((rows, X), jnp.float32))
    ]

    def run(x: jax.Array, ids: jax.Array, weights: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
        return expert_mlp(x, ids, weights, ExpertStack(gate=gate, up=up, down=down))

    compiled = gpu_static.compile_for_h200(run, *shapes, gate, up, down)
    check(compiled, gate)
    memory = compiled.executable.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < E * F * D / 4


@pytest.mark.parametrize("has_triton", [True, False], ids=["triton", "cublas"])
@pytest.mark.parametrize(
    "rows",
    [16, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (1, 64, 512))],
    ids=lambda rows: f"{rows}_rows",
)
@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_float8_by_float8_is_multiplied_in_8_bits(model: str, rows: int, has_triton: bool) -> None:
    """By Triton or cuBLASLt, whichever is faster on the chip: neither sees an operand of more bits.

    A single row is no matrix product for XLA, which reads its codes in a loop of its own.
    """
    for shape in SHAPES[model]:
        weight = weight_of(shape, kind="fp8_e4m3", group=None, scales=jnp.float32, activations="fp8_e4m3")
        x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
        run = functools.partial(quantized_matmul, implementation="xla")
        compiled = gpu_static.compile_for_h200(run, x, weight, options={"xla_gpu_enable_triton_gemm": has_triton})
        text, size = compiled.executable.as_text(), ",".join(map(str, shape))
        names = set(re.findall(rf"%(\S+) = f8e4m3fn\[{size}\]", text))
        wide = re.findall(rf"(?:bf16|f16|f32)\[{size}\]\S* (?:fusion|custom-call|copy)\(", text)
        assert names and not wide, (shape, wide)
        if rows > 1:
            assert "__cublas$lt$matmul$f8" in text or (has_triton and _dots(text) == {"f8e4m3fn"}), shape


def _dots(text: str) -> set[str]:
    """The dtypes of the operands of all dots."""
    types = dict(re.findall(r"%(\S+) = (\w+)\[", text))
    operands = [name for both in re.findall(r" dot\(%(\S+), %(\S+)\)", text) for name in both]
    return {types[name] for name in operands}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("model", "form"), [("Qwen3-0.6B", "int4-g128"), ("Qwen3-30B-A3B", "mxfp4")])
def test_the_whole_step_of_a_model_is_compiled_with_its_kernels(model: str, form: str, devices: int) -> None:
    spec = quantised_spec(spec_of(config_of(model) | {"num_hidden_layers": 2}), form)
    layout, steps = whole_steps(spec, devices, product_implementation="mosaic_gpu")
    assert layout.refused_products == {}
    for compiled in steps:
        assert compiled.executable.as_text().count("mosaic_gpu") > 10
        assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
