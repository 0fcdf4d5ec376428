"""Devices by name, here or not: what executables are compiled for.

    "cpu"              the CPU of this machine
    "tpu:v6e:2x2"      a slice, by the name that its maker gives it; needs libtpu, and no TPU
    "gpu:h200:2"       GPUs of one host, one where no number is given; needs jax's CUDA plugin, and no GPU

Nothing but this file knows how a device that is not here is described to a compiler.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

EXAMPLES = "cpu, tpu:v6e:2x2, gpu:h200"

# Source: NVIDIA's data sheets and the CUDA C++ Programming Guide, table of compute capabilities, 9.0.
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
_GPUS = {
    "h100": _HOPPER.format(bandwidth=3_350_000_000_000, memory=85_000_000_000, name="NVIDIA H100 80GB HBM3"),
    "h200": _HOPPER.format(bandwidth=4_800_000_000_000, memory=150_000_000_000, name="NVIDIA H200"),
}


def target_devices(target: str) -> Sequence[Any]:
    """The devices that a target's name stands for. Of a TPU that is not here, libtpu wants to be told so by the
    environment (see `ferrum-jax compile`) before it is loaded; else it looks for one for minutes.

    Raises ValueError for a name that is none, and where the compiler that it needs is not installed.
    """
    platform, _, rest = target.partition(":")
    if platform == "cpu" and not rest:
        return jax.devices("cpu")
    if platform == "tpu" and rest:
        known = "a generation and a shape of whole hosts, such as tpu:v6e:2x2 or tpu:v5p:2x2x1"
        needs = known if importlib.util.find_spec("libtpu") else "libtpu (pip install 'ferrum-jax[tpu]')"
        return _describe("tpu", target, needs, topology_name=rest)
    kind, _, count = rest.partition(":")
    if platform == "gpu" and kind in _GPUS and (count or "1").isdecimal():
        shape = f"1x1x{count or 1}"  # processes x hosts x GPUS
        plugin = "jax's CUDA plugin (pip install 'ferrum-jax[gpu]')"
        return _describe("cuda", target, plugin, target_config=_GPUS[kind], topology=shape)
    known = f"tpu:GENERATION:SHAPE, gpu:{'|gpu:'.join(_GPUS)}[:COUNT] or cpu"
    raise ValueError(f"target is {target!r}; it must be {known}, such as {EXAMPLES}")


def _describe(platform: str, target: str, needs: str, **how: Any) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(platform=platform, **how).devices
    except Exception as error:  # plugins raise whatever they like
        raise ValueError(f"target {target!r} cannot be described: {error}; it needs {needs}") from error
