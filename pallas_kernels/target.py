"""Target: what kernels and budgets need to know of a device, as a value.

It is read from a live device or named from a table, so that everything that depends on it can be computed, and
compiled, where the device is not. This module asks for no device.
"""

from __future__ import annotations

import dataclasses

import jax

_BLOCK_BYTES = 32 * 1024
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One device. flops: dense bfloat16 multiply-adds counted as two, per second (float32 on the CPU).

    memory_bytes: what programs and their arguments may take of it, less than the data sheet's figure.
    vmem_bytes, smem_bytes, clock_hz: on-chip vector and scalar memory and clock of a TPU core, for kernels that
    lay them out; on Hopper smem_bytes is the shared memory of a program; None elsewhere. mxu_columns: of a TPU's
    matrix unit. num_cores: a Hopper GPU's multiprocessors. has_fp8: the matrix unit multiplies float8; elsewhere
    float8 is only a format to store in.
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

    @classmethod
    def named(cls, name: str) -> Target:
        """The target "cpu", "tpu:v6e", "gpu:h200" and so on. Raises ValueError with the known names."""
        if name not in _TARGETS:
            raise ValueError(f"target is {name!r}; known targets are {sorted(_TARGETS)}")
        return _TARGETS[name]

    @classmethod
    def of_device(cls, device: jax.Device) -> Target:  # pyright: ignore[reportInvalidTypeForm]
        """The target of a live device, or of one of a topology description.

        Raises ValueError where its kind is not in the table.
        """
        if device.platform == "cpu":
            return _TARGETS["cpu"]
        kind = device.device_kind.lower()
        for part, name in _KINDS:
            if part in kind:
                return _TARGETS[name]
        raise ValueError(f"device is a {device.device_kind!r}; known kinds contain {[part for part, _ in _KINDS]}")

    def block_size(self, bytes_per_token: int) -> int:
        """Tokens of a KV block by default; bytes_per_token: of K and V of one layer on one device.

        The smallest power of two from 16 whose block holds 32 KB, so that one transfer is worth its start, at most
        128; 16 on the CPU.
        """
        size = _SMALLEST_BLOCK
        while self.platform != "cpu" and size < _LARGEST_BLOCK and size * bytes_per_token < _BLOCK_BYTES:
            size *= 2
        return size


def _target(
    platform: str,
    generation: str,
    memory_gib: float,
    gb_per_s: float,
    tflops: float,
    *,
    vmem_mib: int | None = None,
    flops_per_cycle: int = 0,
    mxu: int | None = None,
    has_fp8: bool = False,
    num_cores: int | None = None,
) -> Target:
    return Target(
        platform=platform,
        generation=generation,
        memory_bytes=int(memory_gib * 2**30),
        bandwidth_bytes_per_s=gb_per_s * 1e9,
        flops_per_s=tflops * 1e12,
        vmem_bytes=None if vmem_mib is None else vmem_mib * 2**20,
        smem_bytes=_SMEM_BYTES if platform == "tpu" else _SHARED_BYTES if num_cores else None,
        clock_hz=None if not flops_per_cycle else round(tflops * 1e12 / flops_per_cycle, -7),
        mxu_columns=mxu,
        has_fp8=has_fp8,
        num_cores=num_cores,
    )


# Source: the vendors' data sheets, dense bfloat16; the CPU's row is what two cores of a small machine reach.
# Memory of TPUs: what libtpu's compiler says is there when a program takes more; of GPUs: what CUDA leaves free.
# What is in a TPU core: jax.experimental.pallas.tpu.get_tpu_info; libtpu refuses programs at the same sizes of memory.
# No vendor states a TPU's clock: it is the peak over the power of two of flops a cycle that gives a round figure.
_SMEM_BYTES = 2**20
_SHARED_BYTES = 227 * 2**10  # of a Hopper program
_TARGETS = {
    "cpu": _target("cpu", "cpu", 8, 30, 0.4),
    "tpu:v5e": _target("tpu", "v5e", 15.75, 819, 197, vmem_mib=128, flops_per_cycle=2**17, mxu=128),
    "tpu:v5p": _target("tpu", "v5p", 95.7, 2765, 459, vmem_mib=64, flops_per_cycle=2**18, mxu=128),  # two cores as one
    "tpu:v6e": _target("tpu", "v6e", 31.25, 1640, 918, vmem_mib=128, flops_per_cycle=2**19, mxu=256, has_fp8=True),
    # one of a chip's two cores
    "tpu:v7x": _target("tpu", "v7x", 94.75, 3690, 1153, vmem_mib=64, flops_per_cycle=2**19, mxu=256, has_fp8=True),
    "gpu:a100": _target("gpu", "a100", 78, 2039, 312),
    "gpu:h100": _target("gpu", "h100", 78, 3350, 989, has_fp8=True, num_cores=132),
    "gpu:h200": _target("gpu", "h200", 139, 4800, 989, has_fp8=True, num_cores=132),
}
_KINDS = (
    ("v5 lite", "tpu:v5e"),
    ("v5e", "tpu:v5e"),
    ("v5p", "tpu:v5p"),
    ("v5", "tpu:v5p"),
    ("v6 lite", "tpu:v6e"),
    ("v6e", "tpu:v6e"),
    ("tpu7x", "tpu:v7x"),
    ("a100", "gpu:a100"),
    ("h100", "gpu:h100"),
    ("h200", "gpu:h200"),
)
