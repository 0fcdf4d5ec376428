"""expert_mlp for Hopper over codes, interpreted, against its float64 oracle; which kernels a stack names."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import expert_mlp, kernels_of, mosaic_gpu, oracle, swiglu
from pallas_kernels.grouped_matmul.cases import GPU_CASES, Case, make_packed_arguments
from pallas_kernels.quantized_matmul import cases as product_cases
from pallas_kernels.quantized_matmul import refusals
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.test_grouped_matmul_tpu import for_kernels, matrices_of

H200 = Target.named("gpu:h200")
FEW_CORES = dataclasses.replace(H200, num_cores=2)  # which the interpreter runs one after the other


def expected_of(x: jax.Array, ids: jax.Array, weights: jax.Array, experts) -> np.ndarray:
    return oracle.packed_expert_mlp(*map(np.asarray, (x, ids, weights)), *matrices_of(experts))


@pytest.mark.parametrize(
    ("case", "form"),
    [
        pytest.param(case, form, id=case.name, marks=() if case.name == "mxfp4" else pytest.mark.slow)
        for case, form in GPU_CASES
    ],
)
def test_every_case_equals_the_product_of_decoded_experts(case: Case, form: product_cases.Case) -> None:
    x, ids, weights, experts = make_packed_arguments(case, form)
    with interpreted() as interpret:
        how = {"activation": swiglu, "sharers": 1, "interpret": interpret}
        run = functools.partial(mosaic_gpu.expert_mlp, num_experts=case.num_experts, **how)
        got = jax.jit(run, compiler_options=FAST_COMPILE)(x, ids, weights, for_kernels(experts, FEW_CORES))
    assert got.dtype == x.dtype
    expected = expected_of(x, ids, weights, experts)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [9, 300])
@pytest.mark.parametrize(("case", "form"), GPU_CASES, ids=[case.name for case, _ in GPU_CASES])
def test_every_case_on_a_gpu_equals_the_product_of_decoded_experts(
    case: Case, form: product_cases.Case, num_tokens: int
) -> None:
    x, ids, weights, experts = make_packed_arguments(dataclasses.replace(case, num_tokens=num_tokens), form)
    got = jax.jit(expert_mlp)(x, ids, weights, for_kernels(experts, H200))
    expected = expected_of(x, ids, weights, experts)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **TOLERANCE["bfloat16"])


def test_a_tile_has_about_the_pairs_of_an_expert() -> None:
    assert [mosaic_gpu.choose_rows(pairs, 4) for pairs in (1, 32, 33, 200, 10_000)] == [8, 8, 16, 64, 128]


def test_a_stack_is_multiplied_by_kernels_that_all_of_it_names() -> None:
    x, _, _, experts = make_packed_arguments(*GPU_CASES[0])
    named = for_kernels(experts, H200)
    assert kernels_of(named) == "mosaic_gpu" and kernels_of(experts) == "xla"
    assert kernels_of(dataclasses.replace(named, up=experts.up)) == "xla"
    assert all(refusals(stack, x.dtype, H200) == [] for stack in matrices_of(experts))
