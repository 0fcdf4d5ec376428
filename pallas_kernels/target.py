"""Target: what kernels and budgets need to know of a device, as a value.

It is read from a live device or named from a table, so that everything that depends on it can be computed, and
compiled, where the device is not. This module asks for no device.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax

_BLOCK_BYTES = 32 * 1024
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One device. flops: dense bfloat16 multiply-adds counted as two, per second (float32 on the CPU).

    memory_bytes: what programs and their arguments may take of it, less than the data sheet's figure.
    vmem_bytes, smem_bytes, clock_hz: on-chip vector and scalar memory and clock of a TPU core, for kernels that
    lay them out; on Hopper smem_bytes is the shared memory of a program; None elsewhere. mxu_columns: of a TPU's
    matrix unit. num_cores: a Hopper GPU's multiprocessors. has_fp8: kernels may give float8 to the matrix unit, which
    v6e's widens to bfloat16; elsewhere float8 is only a format to store in. int8_ops_per_s, fp8_flops_per_s: as flops,
    None where the data sheet is silent. link_bytes_per_s: what it can send to the other devices of its slice or
    machine, by all its links together, while it receives as much.
    For a device that is not in the table, generation and memory are jax's words; all rates are infinite, so that no
    bound follows from them.
    """

    platform: str  # "cpu", "tpu", "gpu"
    generation: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops_per_s: float
    vmem_bytes: int | None
    smem_bytes: int | None
    clock_hz: float | None
    mxu_columns: int | None
    has_fp8: bool
    num_cores: int | None = None
    int8_ops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    link_bytes_per_s: float = math.inf

    @classmethod
    def named(cls, name: str) -> Target:
        """The target "cpu", "tpu:v6e", "gpu:h200" and so on. Raises ValueError with the known names."""
        if name not in _TARGETS:
            raise ValueError(f"target is {name!r}; known targets are {sorted(_TARGETS)}")
        return _TARGETS[name]

    @classmethod
    def of_device(cls, device: Any) -> Target:
        """The target of a live device, or of one of a topology description; of the table where its kind is there.

        Raises ValueError where it is not, and jax does not say either how much memory the device has.
        """
        if device.platform == "cpu":
            return _TARGETS["cpu"]
        kind = device.device_kind.lower()
        for name, pattern in _KINDS.items():
            if re.search(pattern, kind):
                return _TARGETS[name]
        memory_bytes = _memory_bytes(device)
        if memory_bytes is None:
            raise ValueError(
                f"device is a {device.device_kind!r}, which is not one of {sorted(_TARGETS)}, and jax does not say how "
                "much memory it has; take one of these, or JAX_PLATFORMS=cpu"
            )
        unlisted = _target(device.platform, device.device_kind, 0, math.inf, math.inf)  # without a data sheet: no rate
        return dataclasses.replace(unlisted, memory_bytes=memory_bytes)

    @property
    def is_listed(self) -> bool:
        """Whether it is in the table; else jax's words are all that is known."""
        return math.isfinite(self.flops_per_s)

    @property
    def runs_tpu_kernels(self) -> bool:
        """Whether the TPU's kernels can be laid out in its memories."""
        return self.platform == "tpu" and self.vmem_bytes is not None

    def block_size(self, bytes_per_token: int) -> int:
        """Tokens of a KV block by default; bytes_per_token: of K and V of one layer on one device.

        The smallest power of two from 16 whose block holds 32 KB, so that one transfer is worth its start, at most
        128; 16 on the CPU.
        """
        size = _SMALLEST_BLOCK
        while self.platform != "cpu" and size < _LARGEST_BLOCK and size * bytes_per_token < _BLOCK_BYTES:
            size *= 2
        return size


def _memory_bytes(device: Any) -> int | None:
    """Bytes that jax lets programs take, or None, as for a device of a topology description."""
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:
        return None
    return (stats or {}).get("bytes_limit")


def _target(
    platform: str,
    generation: str,
    memory_gib: float,
    gb_per_s: float,
    tflops: float,
    int8_tops: float | None = None,
    fp8_tflops: float | None = None,
    link_gb_per_s: float = math.inf,
) -> Target:
    """A device, without what kernels of its platform know of its inside."""
    return Target(
        platform=platform,
        generation=generation,
        memory_bytes=int(memory_gib * 2**30),
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        flops_per_s=tflops * 1e12,
        vmem_bytes=None,
        smem_bytes=None,
        clock_hz=None,
        mxu_columns=None,
        has_fp8=False,
        int8_ops_per_s=None if int8_tops is None else int8_tops * 1e12,
        fp8_flops_per_s=None if fp8_tflops is None else fp8_tflops * 1e12,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


def _tpu(device: Target, *, vmem_mib: int, flops_per_cycle: int, mxu: int, has_fp8: bool = False) -> Target:
    return dataclasses.replace(
        device,
        vmem_bytes=vmem_mib * 2**20,
        smem_bytes=_SMEM_BYTES,
        clock_hz=round(device.flops_per_s / flops_per_cycle, -7),
        mxu_columns=mxu,
        has_fp8=has_fp8,
    )


def _hopper(device: Target) -> Target:
    return dataclasses.replace(device, smem_bytes=_SHARED_BYTES, has_fp8=True, num_cores=132)


# Source: the vendors' data sheets, dense bfloat16; the CPU's row is what two cores of a small machine reach.
# Memory of TPUs: what libtpu's compiler says is there when a program takes more; of GPUs: what CUDA leaves free.
# Links, in one direction: of TPUs half of what docs.cloud.google.com/tpu/docs has as a chip's interconnect in both (v4:
# 2,400 Gbit/s in one); of GPUs half of NVLink's figure in the data sheets of the SXM cards.
# What is in a TPU core: jax.experimental.pallas.tpu.get_tpu_info; libtpu refuses programs at the same sizes of memory.
# No vendor states a TPU's clock: it is the peak over the power of two of flops a cycle that gives a round figure.
_SMEM_BYTES = 2**20
_SHARED_BYTES = 227 * 2**10  # of a Hopper program
_TARGETS = {
    "cpu": _target("cpu", "cpu", 8, 30, 0.4),
    "tpu:v4": _target("tpu", "v4", 30.75, 1228, 275, link_gb_per_s=300),  # two cores as one; no kernel was made for it
    "tpu:v5e": _tpu(
        _target("tpu", "v5e", 15.75, 819, 197, 394, link_gb_per_s=200), vmem_mib=128, flops_per_cycle=2**17, mxu=128
    ),
    "tpu:v5p": _tpu(
        _target("tpu", "v5p", 95.7, 2765, 459, 918, link_gb_per_s=600), vmem_mib=64, flops_per_cycle=2**18, mxu=128
    ),  # two cores as one
    # Its matrix unit's own float8 are e5m2 and e4m3b11fnuz, at the rate of bfloat16, so it has no rate of fp8. Source:
    # get_tpu_info("v6e") and its is_matmul_supported, jax 0.10.2.
    "tpu:v6e": _tpu(
        _target("tpu", "v6e", 31.25, 1640, 918, 1836, link_gb_per_s=400),
        vmem_mib=128,
        flops_per_cycle=2**19,
        mxu=256,
        has_fp8=True,
    ),
    # one of a chip's two cores
    "tpu:v7x": _tpu(
        _target("tpu", "v7x", 94.75, 3690, 1153, fp8_tflops=2307, link_gb_per_s=300),
        vmem_mib=64,
        flops_per_cycle=2**19,
        mxu=256,
        has_fp8=True,
    ),
    "gpu:a100": _target("gpu", "a100", 78, 2039, 312, 624, link_gb_per_s=300),
    "gpu:h100": _hopper(_target("gpu", "h100", 78, 3350, 989, 1979, 1979, link_gb_per_s=450)),
    "gpu:h200": _hopper(_target("gpu", "h200", 139, 4800, 989, 1979, 1979, link_gb_per_s=450)),
}
# Patterns of kinds, in small letters. To the end: parts of a GPU, PCIe cards and superchips have other numbers.
_KINDS = {
    "tpu:v4": r"\bv4$",
    "tpu:v5e": r"\bv5( lite|e)\b",
    "tpu:v5p": r"\bv5p?$",
    "tpu:v6e": r"\bv6( lite|e)\b",
    "tpu:v7x": r"tpu7x",
    "gpu:a100": r"\ba100[- ](sxm4-)?80gb( pcie)?$",
    "gpu:h100": r"\bh100 80gb hbm3$",
    "gpu:h200": r"\bh200( nvl)?$",
}
