"""Products with weights in a form that a check runs: few and many rows, dense weights and experts.

On a chip the kernels are proven for the sizes that engines run; off one, interpreted, for a single tiny case.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ferrum_jax.cli.device_check.problem import INTERPRETED_AS, Problem, chosen, interpreter, kernel_of, options_of
from pallas_kernels.grouped_matmul import cases as expert_cases
from pallas_kernels.grouped_matmul import expert_mlp, swiglu
from pallas_kernels.grouped_matmul import oracle as expert_oracle
from pallas_kernels.grouped_matmul.dense_support import DENSE
from pallas_kernels.quantized_matmul import cases as product_cases
from pallas_kernels.quantized_matmul import form_class, quantized_matmul, refusals
from pallas_kernels.quantized_matmul import oracle as product_oracle
from pallas_kernels.target import Target
from pallas_kernels.tolerance import tolerance_of


def products(target: Target | None, platform: str, full: bool) -> Iterator[Problem]:
    """Products of dense weights. On a chip the sizes that engines run come first, for a speed of each form."""
    kernel = kernel_of("quantized_matmul", target, platform)
    real = () if platform == "cpu" else product_cases.REAL_CASES
    cases = product_cases.GPU_CASES if kernel == "mosaic_gpu" else product_cases.TPU_CASES
    for case in (*real, *chosen(cases, "quantized_matmul", platform, full)):
        yield _product(case, kernel, target, platform, is_real=case in real)


def _product(
    case: product_cases.Case, kernel: str | None, target: Target | None, platform: str, *, is_real: bool
) -> Problem:
    chip = target or Target.named(INTERPRETED_AS)
    arguments = functools.cache(functools.partial(product_cases.make_arguments, case))

    def begin(implementation: str) -> Callable[[], Any]:
        x, weight = arguments()
        if implementation == "xla":
            run: Any = functools.partial(quantized_matmul, implementation="xla")
        elif platform == "cpu":
            from pallas_kernels.quantized_matmul import mosaic_tpu

            run = functools.partial(
                mosaic_tpu.quantized_matmul, out_dtype=x.dtype, activation_scales=None, interpret=interpreter()
            )
        else:
            run = quantized_matmul
        compiled = jax.jit(run, compiler_options=options_of(platform))
        given = weight if implementation == "xla" else dataclasses.replace(weight, kernels=chip)
        return lambda: compiled(x, given)

    x, weight = arguments()
    is_refused = kernel is None or bool(refusals(weight, x.dtype, chip))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
    return Problem(
        op="quantized_matmul",
        shape=_class_of(case),
        name=case.name,
        implementations=("xla",) if is_refused or kernel is None else ("xla", kernel),
        begin=begin,
        oracle=lambda: product_oracle.quantized_matmul(np.asarray(arguments()[0]), arguments()[1]),
        **_common(platform),
        num_bytes=num_bytes if is_real else None,
        flops=2 * case.num_tokens * case.num_inputs * case.num_outputs if is_real else None,
    )


def experts_of_kernels(target: Target | None, platform: str, full: bool) -> Iterator[Problem]:
    """Products of experts that kernels multiply: kept as codes, and on TPUs bfloat16."""
    kernel = kernel_of("grouped_matmul", target, platform)
    real = () if platform == "cpu" else expert_cases.REAL_TPU_CASES
    cases = expert_cases.GPU_CASES if kernel == "mosaic_gpu" else expert_cases.TPU_CASES
    tiny = [pair for pair in cases if full or platform != "cpu"]
    for case, form in (*real, *tiny):
        yield _experts(case, form, kernel, target, platform, is_real=(case, form) in real)
    if kernel == "mosaic_tpu" and (full or platform != "cpu"):
        for dense in expert_cases.DENSE_TPU_CASES[: 1 if platform == "cpu" else None]:
            yield _experts(dense, None, kernel, target, platform, is_real=dense.name == "dense_real")


def _experts(
    case: expert_cases.Case,
    form: product_cases.Case | None,
    kernel: str | None,
    target: Target | None,
    platform: str,
    *,
    is_real: bool,
) -> Problem:
    """form: of the codes; None for dense experts."""
    chip = target or Target.named(INTERPRETED_AS)
    make: Any = expert_cases.make_arguments if form is None else expert_cases.make_packed_arguments
    arguments = functools.cache(functools.partial(make, case, *(() if form is None else (form,))))

    def begin(implementation: str) -> Callable[[], Any]:
        *tokens, experts = arguments()
        if implementation != "xla":
            parts: dict[str, Any] = {part: getattr(experts, part) for part in ("gate", "up", "down")}
            named = {part: dataclasses.replace(weight, kernels=chip) for part, weight in parts.items() if form}
            experts = dataclasses.replace(experts, **(named or {"kernels": chip}))
        run: Any = functools.partial(expert_mlp, implementation=implementation)
        if implementation != "xla" and platform == "cpu":  # the TPU's kernel is interpreted
            from pallas_kernels.grouped_matmul import mosaic_tpu

            how = {"num_experts": case.num_experts, "activation": swiglu, "interpret": interpreter()}
            run = functools.partial(mosaic_tpu.expert_mlp, **how)
        compiled = jax.jit(run, compiler_options=options_of(platform))
        return lambda: compiled(*tokens, experts)

    def oracle() -> np.ndarray:
        tokens: Any = map(np.asarray, arguments()[:-1])
        if form is None:
            return expert_oracle.expert_mlp(*tokens, *map(np.asarray, stacks))
        return expert_oracle.packed_expert_mlp(*tokens, *stacks)

    x, *_, experts = arguments()
    stacks: tuple[Any, ...] = (experts.gate, experts.up, experts.down)
    is_refused = kernel is None or (form and any(refusals(stack, x.dtype, chip) for stack in stacks))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stacks))
    pairs = case.num_tokens * case.num_experts_per_token
    return Problem(
        op="grouped_matmul",
        shape=DENSE if form is None else _class_of(form),
        name=f"experts {case.name}",
        implementations=("xla",) if is_refused or kernel is None else ("xla", kernel),
        begin=begin,
        oracle=oracle,
        **_common(platform),
        num_bytes=num_bytes if is_real else None,
        flops=6 * pairs * case.width * case.hidden if is_real else None,
    )


def _class_of(form: product_cases.Case) -> str:
    return form_class(form.kind, form.group, form.has_zeros, form.activations)


def _common(platform: str) -> dict[str, Any]:
    """The common part of problems of products."""
    return {"dtype": "bfloat16", "tolerance": tolerance_of("bfloat16", platform), "axes": ("token", "output")}
