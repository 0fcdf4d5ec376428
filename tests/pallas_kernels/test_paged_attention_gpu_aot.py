"""Attention in sizes that models have, compiled for an H200 that is not here."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest

from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import spec_of
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.step import trace_forward
from pallas_kernels.paged_attention.cases import Case, make_shapes
from scripts import gpu_static
from scripts.hopper_cases import gpu_cases
from scripts.published import PUBLISHED

pytestmark = pytest.mark.aot
QUICK = ("llama_8b_mixed", "llama_8b_mixed_int8_c16", "phi3_mixed", "gemma_decode")
# Bytes of a thread: H = 256 leaves no registers to convert K and V in; a program's first words are kept for its end.
SPILLED = {"gemma_mixed_int8": 1024, "deepseek_v3_decode_c16": 32}


MARKS = {False: [pytest.mark.slow], True: []}
CASES = [pytest.param(case, id=case.name, marks=MARKS[case.name in QUICK]) for case in gpu_cases()]


@pytest.mark.parametrize("case", CASES)
def test_it_fits_registers_and_shared_memory_and_the_pool_stays_where_it_is(case: Case) -> None:
    compiled = gpu_static.compile_case(case)
    assert all(kernel.spill_bytes <= SPILLED.get(case.name, 0) for kernel in compiled.kernels)
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


@pytest.mark.parametrize("head_dim", [128, pytest.param(192, marks=pytest.mark.slow)])
def test_values_of_96_compile_beside_wider_keys(head_dim: int) -> None:
    """Both operands of a product have one swizzle, and 96 values allow a shorter one than the keys."""
    case = next(case for case in gpu_cases() if case.name == "llama_8b_mixed")
    compiled = gpu_static.compile_case(dataclasses.replace(case, head_dim=head_dim, v_head_dim=96))
    assert compiled.kernels and all(kernel.spill_bytes == 0 for kernel in compiled.kernels)


def test_the_compiler_s_report_of_a_kernel_is_read() -> None:
    """A kernel that was compiled before in the process is not reported again; this one no case has."""
    case = next(case for case in gpu_cases() if case.name == "qwen3_30b_tp4_decode_c64")
    compiled = gpu_static.compile_case(dataclasses.replace(case, num_heads=5, soft_cap=3.0))
    assert compiled.kernels and all(64 < kernel.registers <= 255 for kernel in compiled.kernels[:1])


def whole_steps(spec: ModelSpec, devices: int, **kernels: Any) -> tuple[Layout, Iterator[gpu_static.Compiled]]:
    """A layout over H200s, and the largest forward that decodes and the largest of all. kernels: which it has."""
    config = EngineConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=4096,
        kv_memory_bytes=1 << 30,
        mesh=f"tp={devices}",
        **kernels,
    )
    layout = lay_out(spec, config, make_mesh(config.mesh_shape, gpu_static.h200s(devices)))
    decode = [bucket for bucket in layout.ladder.buckets if bucket.decode_only][-1]
    given = (layout.graph, layout.targets, layout.pools)
    traces = (
        functools.partial(trace_forward, *given, bucket, layout.options, layout.mesh)
        for bucket in (decode, layout.ladder.buckets[-1])
    )
    return layout, map(gpu_static.compile_traced, traces)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_whole_step_of_a_model_keeps_its_pools_in_place(devices: int) -> None:
    spec = dataclasses.replace(spec_of(PUBLISHED["Qwen3-0.6B"][0]), num_hidden_layers=2, cache_groups=())
    layout, steps = whole_steps(spec, devices, implementation="mosaic_gpu")
    for compiled in steps:
        memory, text = compiled.executable.memory_analysis(), compiled.executable.as_text()
        pool = layout.pools.kv[0].values
        assert memory is not None and memory.alias_size_in_bytes >= 2 * pool.size * 2 // devices
        shape = ",".join(map(str, pool.sharding.shard_shape(pool.shape)))
        assert f"bf16[{shape}]" in text and not re.search(rf"bf16\[{shape}\]\S* copy\(", text)
        # nothing that the host has to wait for, so that the whole is one CUDA graph
        assert not re.search(r" (while|conditional)\(", text)
        # of an array of its own: a part of another begins anywhere, and a GPU's runtime refuses such an operand
        assert not re.search(r"dynamic-slice-fusion[^{]*\{[^}]*mosaic_gpu", text)
