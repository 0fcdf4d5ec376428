"""quantized_matmul for Mosaic TPU, interpreted, against its float64 oracle; what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import mosaic_tpu, oracle, quantized_matmul, refusals, xla
from pallas_kernels.quantized_matmul.cases import TPU_CASES, Case, make_arguments
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.tpu_interpreter import INTERPRET

V5E, V7X = Target.named("tpu:v5e"), Target.named("tpu:v7x")  # matrix units of 128 and 256, without and with E4M3
_MARKS = {"w4a16": (), "w8a8": (pytest.mark.slow,), "mxfp4": (pytest.mark.slow,)}  # the others take minutes together


def product(case: Case, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the oracle's."""
    x, weight = make_arguments(case)
    weight = dataclasses.replace(weight, kernels=target)
    run = functools.partial(
        mosaic_tpu.quantized_matmul,
        out_dtype=jnp.dtype(jnp.float32),
        activation_scales=None,
        interpret=INTERPRET,
    )
    got = jax.jit(run, compiler_options=FAST_COMPILE)(x, weight)
    return np.asarray(got, np.float64), oracle.quantized_matmul(np.asarray(x), weight)


@pytest.mark.parametrize("target", [V5E, V7X], ids=lambda target: target.generation)
@pytest.mark.parametrize("num_tokens", [None, 130], ids=["few", "many"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=_MARKS.get(c.name, (pytest.mark.slow, pytest.mark.long))) for c in TPU_CASES],
)
def test_every_case_equals_the_float64_oracle(case: Case, num_tokens: int | None, target: Target) -> None:
    case = case if num_tokens is None else dataclasses.replace(case, num_tokens=num_tokens)
    got, expected = product(case, target)
    np.testing.assert_allclose(got, expected, **TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(512, 512), (4352, 128)], ids=["outputs", "inputs"])
def test_weights_are_decoded_by_turns_in_an_even_and_an_odd_number_of_steps(num_inputs: int, num_outputs: int) -> None:
    w4a16 = next(case for case in TPU_CASES if case.name == "w4a16")
    case = dataclasses.replace(w4a16, num_inputs=num_inputs, num_outputs=num_outputs, num_tokens=130)
    got, expected = product(case, V5E)
    np.testing.assert_allclose(got, expected, **TOLERANCE["bfloat16"])


@pytest.mark.slow
def test_an_int8_product_has_the_bits_of_xla() -> None:
    x, weight = make_arguments(next(case for case in TPU_CASES if case.name == "w8a8"))
    out = jnp.dtype(jnp.bfloat16)
    got = mosaic_tpu.quantized_matmul(x, dataclasses.replace(weight, kernels=V5E), out, None, interpret=INTERPRET)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(xla.quantized_matmul(x, weight, out, None)))


def test_what_the_kernels_do_not_take_is_refused_with_every_reason() -> None:
    x, weight = make_arguments(Case(name="", kind="int4", group=16, num_inputs=320, num_outputs=40))
    reasons = refusals(weight, x.dtype, V5E)
    assert [reason.split(";")[0] for reason in reasons] == [
        "activations are float32",
        "320 inputs of a device are no multiple of 256",
        "40 outputs of a device are no multiple of 128",
        "a group has 16 inputs",
    ]
    with pytest.raises(ValueError, match="'mosaic_tpu' does not multiply this weight, take 'xla': activations are"):
        quantized_matmul(x, dataclasses.replace(weight, kernels=V5E))
    with pytest.raises(ValueError, match="the weight names no TPU"):
        quantized_matmul(x, weight, implementation="mosaic_tpu")


def test_int8_is_left_to_xla_where_the_matrix_unit_has_no_such_product() -> None:
    x, weight = make_arguments(next(case for case in TPU_CASES if case.name == "w8a8"))
    assert refusals(weight, x.dtype, V5E) == []
    assert refusals(weight, x.dtype, V7X) == ["v7x has no int8 product, which 'xla' makes exactly"]
    assert refusals(weight, x.dtype, Target.named("cpu")) != []
