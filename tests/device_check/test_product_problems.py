"""Which products a check compares on which chip."""

import pytest

from ferrum_jax.cli.device_check.op_problems import problems as problems_of
from ferrum_jax.cli.device_check.problem import kernel_of
from ferrum_jax.cli.device_check.product_problems import experts_of_kernels, products
from pallas_kernels.gated_delta import cases as delta_cases
from pallas_kernels.grouped_matmul import cases as expert_cases
from pallas_kernels.quantized_matmul import cases as product_cases
from pallas_kernels.state_space import cases as space_cases
from pallas_kernels.target import Target


@pytest.mark.parametrize(("name", "kernel"), [("gpu:h200", "mosaic_gpu"), ("tpu:v5e", "mosaic_tpu")])
def test_a_chip_s_own_kernels_are_compared_in_every_form_that_they_take(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_cases, "REAL_CASES", ())
    monkeypatch.setattr(expert_cases, "REAL_TPU_CASES", ())
    target = Target.named(name)
    problems = [
        *products(target, target.platform, True),
        *experts_of_kernels(target, target.platform, True),
    ]
    assert {problem.implementations for problem in problems} == {("xla", kernel)}
    forms = {problem.shape for problem in problems}
    assert {"int4 group=128", "mxfp4 group=32", "fp8_e4m3 group=128", "int8 group=all"} <= forms


def test_recurrences_are_compared_on_tpus_alone_each_in_a_class_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    v6e, hopper = Target.named("tpu:v6e"), Target.named("gpu:h200")
    monkeypatch.setattr(delta_cases, "REAL_TPU_CASES", ())
    monkeypatch.setattr(space_cases, "REAL_TPU_CASES", ())
    for op, classes in (
        ("gated_delta", {"16 by 128", "16 by 128 by channel"}),
        ("state_space", {"16 by 128", "64 by 128"}),
    ):
        problems = [problem for problem in problems_of(op, v6e, "tpu", full=True) if len(problem.implementations) > 1]
        assert {problem.implementations for problem in problems} == {("xla", "mosaic_tpu")}
        assert {problem.shape for problem in problems} == classes
        assert {problem.implementations for problem in problems_of(op, hopper, "gpu", full=True)} == {("xla",)}


def test_a_gpu_without_such_kernels_and_a_write_have_none() -> None:
    assert kernel_of("quantized_matmul", Target.named("gpu:a100"), "gpu") is None
    assert kernel_of("kv_write", Target.named("gpu:h200"), "gpu") is None
