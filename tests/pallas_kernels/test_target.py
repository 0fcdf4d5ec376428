"""Targets by name and by device, and the block size that follows."""

import types

import jax
import pytest

from pallas_kernels.paged_attention.support import default_implementation, refusals
from pallas_kernels.target import Target


def test_a_named_target_and_a_live_device_of_its_kind_are_the_same() -> None:
    assert Target.of_device(jax.devices("cpu")[0]) == Target.named("cpu")
    kinds = {"TPU v5 lite": "tpu:v5e", "TPU v5": "tpu:v5p", "TPU v6 lite": "tpu:v6e", "NVIDIA H200": "gpu:h200"}
    for kind, name in kinds.items():
        device = types.SimpleNamespace(platform=name[:3], device_kind=kind)
        assert Target.of_device(device) == Target.named(name)


def test_an_unknown_target_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"target is 'tpu:v1'; known targets are .*'tpu:v6e'"):
        Target.named("tpu:v1")


def device(kind: str, **stats: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(platform=kind[:3].lower(), device_kind=kind, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    "kind",
    [
        *("NVIDIA L4", "NVIDIA L40S", "NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090", "NVIDIA B200"),
        *("NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H20"),
        *("AMD Instinct MI300X", "TPU v3"),
    ],
)
def test_an_unlisted_accelerator_has_jaxs_memory_and_no_bounds(kind: str) -> None:
    target = Target.of_device(device(kind, bytes_limit=2**34))
    assert (target.generation, target.memory_bytes, target.is_listed) == (kind, 2**34, False)
    assert 1 / target.bandwidth_bytes_per_s == 1 / target.flops_per_s == 0
    assert default_implementation(target) == "xla"
    for kernel in ("mosaic_tpu", "mosaic_gpu"):
        assert refusals(kernel, target=target, head_dim=128, block_size=16, kv_dtype="bfloat16")
    with pytest.raises(ValueError, match=f"device is a '{kind}'.*how much memory"):
        Target.of_device(device(kind))


def test_a_tpu_v4_is_in_the_table_and_has_no_kernel() -> None:
    target = Target.of_device(device("TPU v4"))
    assert target.is_listed and default_implementation(target) == "xla"
    (reason,) = refusals("mosaic_tpu", target=target, head_dim=128, block_size=16, kv_dtype="fp8_e4m3")
    assert reason == "implementation is 'mosaic_tpu'; for v4 no kernel was made: take 'xla'"


def test_kinds_of_one_gpu_are_told_apart() -> None:
    for kind, name in {
        "NVIDIA A100 80GB PCIe": "gpu:a100",
        "NVIDIA H100 80GB HBM3": "gpu:h100",
        "TPU v5e": "tpu:v5e",
    }.items():
        assert Target.of_device(device(kind)) == Target.named(name)


@pytest.mark.parametrize(
    ("target", "bytes_per_token", "tokens"),
    [("cpu", 8, 16), ("tpu:v6e", 4096, 16), ("tpu:v6e", 2048, 16), ("gpu:h200", 512, 64), ("tpu:v5e", 8, 128)],
)
def test_a_block_holds_32_kb_between_16_and_128_tokens(target: str, bytes_per_token: int, tokens: int) -> None:
    assert Target.named(target).block_size(bytes_per_token) == tokens


@pytest.mark.parametrize(
    ("generation", "vmem_mib", "clock_ghz", "mxu_columns", "has_fp8"),
    [
        ("v5e", 128, 1.50, 128, False),
        ("v5p", 64, 1.75, 128, False),
        ("v6e", 128, 1.75, 256, True),
        ("v7x", 64, 2.20, 256, True),
    ],
)
def test_a_tpu_states_its_on_chip_memories_clock_and_matrix_unit(
    generation: str, vmem_mib: int, clock_ghz: float, mxu_columns: int, has_fp8: bool
) -> None:
    target = Target.named(f"tpu:{generation}")
    assert (target.vmem_bytes, target.smem_bytes) == (vmem_mib * 2**20, 2**20)
    assert (target.clock_hz, target.mxu_columns, target.has_fp8) == (clock_ghz * 1e9, mxu_columns, has_fp8)


@pytest.mark.parametrize(
    ("name", "cores", "shared"), [("cpu", None, None), ("gpu:a100", None, None), ("gpu:h200", 132, 227)]
)
def test_only_a_tpu_states_on_chip_memories_and_hopper_its_multiprocessors(name, cores, shared) -> None:
    target = Target.named(name)
    smem_bytes = None if shared is None else shared * 2**10
    assert (target.vmem_bytes, target.smem_bytes, target.clock_hz) == (None, smem_bytes, None)
    assert target.num_cores == cores
