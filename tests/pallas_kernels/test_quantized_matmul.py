"""quantized_matmul against its float64 oracle, for every kind of code and of activations."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import oracle, quantized_matmul
from pallas_kernels.quantized_matmul.cases import CASES, Case, make_arguments
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_the_float64_oracle(case: Case) -> None:
    x, weight = make_arguments(case)
    got = jax.jit(quantized_matmul, compiler_options=FAST_COMPILE)(x, weight)
    assert got.dtype == x.dtype and got.shape == (case.num_tokens, case.num_outputs)
    expected = oracle.quantized_matmul(np.asarray(x), weight)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE[case.dtype])


def test_bits_of_an_int8_product_depend_on_no_companion() -> None:
    x, weight = make_arguments(Case(name="", kind="int8", activations="int8", num_tokens=40, num_inputs=1024))
    product = jax.jit(quantized_matmul)
    whole, x = map(np.asarray, (product(x, weight), x))
    for rows in (slice(0, 1), slice(3, 5), slice(7, 40)):
        np.testing.assert_array_equal(np.asarray(product(x[rows], weight)), whole[rows])


def test_what_does_not_fit_is_refused() -> None:
    x, weight = make_arguments(CASES[0])
    for wrong, message in (
        (
            {"weight": dataclasses.replace(weight, scales=np.ones((48, 3), np.float32))},
            "groups of scales, 3, do not divide the 64",
        ),
        ({"weight": dataclasses.replace(weight, scales=np.ones((40, 1), np.float32))}, "axis O of an array of shape"),
        ({"weight": dataclasses.replace(weight, kind="int2")}, "kind is 'int2'; it must be one of"),
        ({"implementation": "mosaic"}, "implementation is 'mosaic'; quantized_matmul has 'xla', 'mosaic_tpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_matmul(x, **({"weight": weight} | wrong))
