"""quantized_matmul for Hopper, interpreted with race detection, against its float64 oracle; its bits; its refusals."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import implementation_of, mosaic_gpu, oracle, quantized_matmul, refusals
from pallas_kernels.quantized_matmul.cases import GPU_CASES, Case, make_arguments
from pallas_kernels.quantized_matmul.gpu import decode
from pallas_kernels.quantized_matmul.gpu.config import CodesForm, ProductTiles
from pallas_kernels.quantized_matmul.gpu.kernel import num_pieces
from pallas_kernels.quantized_matmul.gpu.product_ops import in_order
from pallas_kernels.quantized_matmul.xla import float8_dot
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.gpu_interpreter import fetches, interpreted

H200 = Target.named("gpu:h200")
QUICK = ("w4a16", "mxfp4", "w8a16_groups", "fp8_blocks")
BY_NAME = {case.name: case for case in GPU_CASES}


def arguments_of(case: Case) -> tuple[Any, Any]:
    x, weight = make_arguments(case)
    return x, dataclasses.replace(weight, kernels=H200)


def tiles_of(case: Case, weight: Any, *, programs: int = 3, **named: Any) -> ProductTiles:
    """The chosen ones with few programs and warpgroups: the interpreter has no threads for as many as wait."""
    named = {"sharers": 1} | named
    chosen = ProductTiles.choose(case.num_tokens, case.num_outputs, mosaic_gpu.form_of(weight), H200, **named)
    return dataclasses.replace(chosen, programs=min(chosen.programs, programs), stages=min(chosen.stages, 2))


def run(x: Any, weight: Any, tiles: ProductTiles | None, interpret: Any) -> np.ndarray:
    how: dict[str, Any] = {"out_dtype": jnp.dtype(jnp.float32), "activation_scales": None}
    product = functools.partial(mosaic_gpu.quantized_matmul, **how, tiles=tiles, interpret=interpret)
    compiled = jax.jit(product, compiler_options=FAST_COMPILE if interpret else None)
    return np.asarray(compiled(x, weight), np.float64)


def check(case: Case, **named: Any) -> None:
    x, weight = arguments_of(case)
    with interpreted() as interpret:
        got = run(x, weight, tiles_of(case, weight, **named), interpret)
    np.testing.assert_allclose(got, oracle.quantized_matmul(np.asarray(x), weight), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("is_divided", [False, True], ids=["whole", "divided"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in GPU_CASES],
)
def test_every_case_equals_the_float64_oracle(case: Case, is_divided: bool) -> None:
    check(case, is_divided=is_divided)


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [{"consumers": 2, "sharers": 2}, {"parts": 2}, {"tile_in": 512}, {"tile_rows": 8}],
    ids=["sharers", "parts", "tile_in", "tile_rows"],
)
def test_every_cut_of_a_product_gives_the_same_numbers(named: dict[str, int]) -> None:
    check(dataclasses.replace(BY_NAME["w4a16"], num_outputs=512, num_inputs=1024, num_tokens=40), **named)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [None, 200], ids=["few", "many"])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_every_case_equals_the_float64_oracle_on_a_gpu(case: Case, num_tokens: int | None) -> None:
    x, weight = arguments_of(case if num_tokens is None else dataclasses.replace(case, num_tokens=num_tokens))
    expected = oracle.quantized_matmul(np.asarray(x), weight)
    np.testing.assert_allclose(run(x, weight, None, False), expected, **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 512])
def test_float8_by_float8_on_a_gpu_is_summed_in_float32(num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    codes, others = (
        jnp.asarray(rng.standard_normal(shape) * 20, jnp.float8_e4m3fn) for shape in ((num_tokens, 4096), (256, 4096))
    )
    expected = np.asarray(codes, np.float64) @ np.asarray(others, np.float64).T
    found = np.asarray(jax.jit(float8_dot)(codes, others), np.float64)
    size = np.abs(np.asarray(codes, np.float64)) @ np.abs(np.asarray(others, np.float64)).T
    assert (np.abs(found - expected) / size).max() < 1e-5  # the units' own sums, of 14 bits, are 30 times as far


class Bits:
    """The instructions that decode codes, on Python's integers."""

    arith = types.SimpleNamespace(
        andi=lambda a, b: a & b,
        ori=lambda a, b: a | b,
        muli=lambda a, b: a * b & 0xFFFFFFFF,
        shli=lambda a, b: a << b & 0xFFFFFFFF,
        shrui=lambda a, b: a >> b,
    )

    @staticmethod
    def prmt(low: int, high: int, selector: int) -> int:
        given = [*low.to_bytes(4, "little"), *high.to_bytes(4, "little")]
        return int.from_bytes(bytes(given[selector >> 4 * i & 7] for i in range(4)), "little")

    @staticmethod
    def two(instruction: str, a: int, b: int) -> int:
        left, right = floats(a), floats(b)
        found = left - right if instruction.startswith("sub") else left * right
        return int.from_bytes(found.astype(jnp.bfloat16).tobytes(), "little")

    @staticmethod
    def fused(a: int, b: int, c: int) -> int:
        found = floats(a).astype(np.float64) * floats(b) + floats(c)
        return int.from_bytes(found.astype(np.float32).astype(jnp.bfloat16).tobytes(), "little")


def floats(word: int) -> np.ndarray:
    """The two bfloat16 of a word."""
    return np.frombuffer(word.to_bytes(4, "little"), np.dtype(jnp.bfloat16)).astype(np.float32)


@pytest.mark.parametrize("kind", ["int4", "mxfp4", "int8", "fp8_e4m3"])
def test_the_bits_of_every_code_become_its_value_in_the_order_of_x(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "arith": Bits.arith,
        "utils": types.SimpleNamespace(prmt=Bits.prmt),
        "_int": lambda value: value,
        "_two": Bits.two,
        "_fused": Bits.fused,
    }.items():
        monkeypatch.setattr(decode, name, value)
    form = CodesForm(kind=kind, num_inputs=512, num_groups=1, has_zeros=False)
    case = Case(name="", kind=kind, num_inputs=form.chunk, num_outputs=64)
    _, weight = make_arguments(case)
    weight = dataclasses.replace(weight, scales=np.ones((64, 1), np.float32))
    words = np.asarray(mosaic_gpu.packed_stack(weight).codes).view("<u4").reshape(64, 4, 4)  # row, thread, word
    unit = None
    if form.unit != 1.0:
        power = np.full(2, decode._exponent(form), jnp.bfloat16)
        unit = (int.from_bytes(power.tobytes(), "little"),)
    found = np.zeros((64, form.quarter // 2, 4, 2))  # row, pair, thread, half
    for row, thread in np.ndindex(64, 4):
        pairs = decode._decoded(form, words[row, thread].tolist(), unit, None)
        found[row, :, thread] = np.stack([floats(pair) for pair in pairs]) * form.unit
    expected = in_order(jnp.asarray(oracle.decode(weight), jnp.float32), form)
    np.testing.assert_array_equal(found.reshape(64, -1), np.asarray(expected))


def test_every_step_of_every_tile_is_run_by_one_program() -> None:
    for steps, num_tiles, programs in ((16, 32, 132), (56, 3, 7), (1, 200, 132), (4, 5, 20)):
        owners = np.searchsorted(
            np.arange(1, programs + 1) * steps * num_tiles // programs, np.arange(steps * num_tiles), side="right"
        )
        by_tile = [len(set(tile)) for tile in owners.reshape(num_tiles, steps)]
        np.testing.assert_array_equal(num_pieces(steps, num_tiles, programs), by_tile)


@pytest.mark.parametrize("case", [BY_NAME["w4a16"], BY_NAME["fp8_weights"]], ids=lambda case: case.name)
def test_every_transfer_begins_where_shared_memory_takes_one(case: Case) -> None:
    """The hardware faults otherwise; the compiler and the interpreter say nothing."""
    for num_tokens in (1, 16, 130):
        x, weight = arguments_of(dataclasses.replace(case, num_tokens=num_tokens, num_outputs=384))
        product = functools.partial(mosaic_gpu.quantized_matmul, out_dtype=x.dtype, activation_scales=None)
        found = list(fetches(jax.make_jaxpr(product)(x, weight).jaxpr))
        assert len(found) >= 2
        assert all(place % wanted == 0 for place, wanted in found), found


def test_tiles_fit_shared_memory_and_few_rows_share_the_inputs() -> None:
    form = CodesForm(kind="int4", num_inputs=4096, num_groups=32, has_zeros=False)
    for rows in (1, 16, 64, 512):
        for outputs in (768, 4096, 14336):
            tiles = ProductTiles.choose(rows, outputs, form, H200)
            assert outputs % tiles.tile_out == 0 and tiles.stages >= 3 and tiles.smem_bytes <= (H200.smem_bytes or 0)
    assert ProductTiles.choose(16, 4096, form, H200).is_divided, "32 tiles leave 100 multiprocessors idle"
    assert not ProductTiles.choose(512, 4096, form, H200).is_divided
    with pytest.raises(ValueError, match="states no multiprocessors"):
        ProductTiles.choose(16, 4096, form, Target.named("gpu:a100"))


def test_what_the_kernels_do_not_take_is_refused_with_every_reason() -> None:
    x, weight = make_arguments(Case(name="", kind="int4", group=16, num_inputs=320, num_outputs=40))
    a100 = Target.named("gpu:a100")
    assert [reason.split(";")[0] for reason in refusals(weight, x.dtype, a100)] == [
        "a100 is no Hopper GPU, which 'mosaic_gpu' is made for",
        "activations are float32",
        "320 inputs of a device are no multiple of 128",
        "40 outputs of a device are no multiple of 64",
        "a group has 16 inputs",
    ]
    with pytest.raises(ValueError, match="'mosaic_gpu' does not multiply this weight, take 'xla': a100 is"):
        quantized_matmul(x, dataclasses.replace(weight, kernels=a100))
    with pytest.raises(ValueError, match="'mosaic_gpu', and the weight names no GPU"):
        quantized_matmul(x, dataclasses.replace(weight, kernels=Target.named("tpu:v5e")), implementation="mosaic_gpu")


def test_the_codes_that_xla_multiplies_itself_are_left_to_it() -> None:
    for kind in ("int8", "fp8_e4m3"):
        _, weight = make_arguments(Case(name="", kind=kind, activations=kind, num_inputs=512, num_outputs=128))
        (reason,) = refusals(weight, jnp.dtype(jnp.bfloat16), H200)
        assert "'xla'" in reason
    assert all(refusals(weight, x.dtype, H200) == [] for x, weight in map(make_arguments, GPU_CASES))
    assert [implementation_of(target) for target in (None, H200, Target.named("tpu:v5e"))] == [
        "xla",
        "mosaic_gpu",
        "mosaic_tpu",
    ]
