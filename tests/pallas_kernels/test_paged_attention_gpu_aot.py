"""Attention in sizes that models have, compiled for an H200 that is not here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from pallas_kernels.paged_attention.cases import Case, make_shapes
from scripts import gpu_static

pytestmark = pytest.mark.aot
QUICK = ("llama_8b_mixed", "llama_8b_mixed_int8", "gemma_decode")


def _cases() -> Any:
    marks = {False: [pytest.mark.slow], True: []}
    return [pytest.param(case, id=case.name, marks=marks[case.name in QUICK]) for case in gpu_static.gpu_cases()]


@pytest.mark.parametrize("case", _cases())
def test_it_fits_registers_and_shared_memory_and_the_pool_stays_where_it_is(case: Case) -> None:
    compiled = gpu_static.compile_case(case)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    config = gpu_static.config_of(case)
    forms = [config.decode] if config.prefill is None else [config.decode, config.prefill]
    most = max(form.smem_bytes for form in forms)
    assert compiled.shared_bytes <= most <= gpu_static.TARGET.smem_bytes  # what the config counts is what there is
    memory, pool = compiled.executable.memory_analysis(), make_shapes(case, "mosaic_gpu").pool
    pool_bytes = pool.values.size * pool.values.dtype.itemsize
    assert memory is not None and memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 8
    text, shape = compiled.executable.as_text(), ",".join(map(str, pool.values.shape))
    assert not re.search(rf"\[{shape}\]\S* copy\(", text)


def test_the_compiler_s_report_of_a_kernel_is_read() -> None:
    """A kernel that was compiled before in the process is not reported again; this one no case has."""
    case = next(case for case in gpu_static.gpu_cases() if case.name == "qwen3_30b_tp4_decode_c64")
    compiled = gpu_static.compile_case(dataclasses.replace(case, num_heads=5, soft_cap=3.0))
    assert compiled.kernels and all(64 < kernel.registers <= 255 for kernel in compiled.kernels[:1])
