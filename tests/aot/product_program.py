"""Products with weights in a form, compiled for a TPU that is not here."""

from scripts import tpu_static  # isort: skip  # before jax: it sets what libtpu reads

import dataclasses
from typing import Any

import jax

from pallas_kernels.grouped_matmul import cases as expert_cases
from pallas_kernels.grouped_matmul import expert_mlp
from pallas_kernels.quantized_matmul import quantized_matmul, refusals
from pallas_kernels.quantized_matmul.cases import TPU_CASES, make_arguments
from pallas_kernels.target import Target
from tests.aot.described import or_error

_MANY = 130


def describe(name: str, num_rows: int, generation: str) -> dict[str, Any]:
    """The kernels of a case's program, or why it is refused."""
    case = dataclasses.replace(next(case for case in TPU_CASES if case.name == name), num_tokens=num_rows)
    target = Target.named(f"tpu:{generation}")
    arguments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), make_arguments(case))
    x, weight = arguments[0], dataclasses.replace(arguments[1], kernels=target)
    if reasons := refusals(weight, x.dtype, target):
        return {"refused": reasons}
    result = tpu_static.measure(quantized_matmul, [x, weight], generation=generation, counts=False)
    return {"kernels": [kernel.schedule.name for kernel in result.kernels]}


def describe_experts(name: str, num_tokens: int, generation: str) -> dict[str, Any]:
    """The same of a case of experts."""
    case, form = next(pair for pair in expert_cases.TPU_CASES if pair[0].name == name)
    case, target = dataclasses.replace(case, num_tokens=num_tokens), Target.named(f"tpu:{generation}")
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf)),
        expert_cases.make_packed_arguments(case, form),
    )
    *tokens, experts = shapes
    if reasons := refusals(experts.gate, tokens[0].dtype, target):
        return {"refused": reasons}
    parts = {part: dataclasses.replace(getattr(experts, part), kernels=target) for part in ("gate", "up", "down")}
    arguments = [*tokens, dataclasses.replace(experts, **parts)]
    result = tpu_static.measure(expert_mlp, arguments, generation=generation, counts=False)
    return {"kernels": sorted({kernel.schedule.name for kernel in result.kernels})}


def main(generation: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """By name and number of rows. Names of experts begin with "experts "."""
    found = {}
    for name in names:
        describe_case = describe_experts if name.startswith("experts ") else describe
        for num_rows in (16, _MANY):
            said = or_error(describe_case, name.removeprefix("experts "), num_rows, generation)
            found[f"{name}, {num_rows} rows"] = said
    return found
