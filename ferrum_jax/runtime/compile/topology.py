"""Devices by name, here or not: what executables are compiled for.

    "cpu"              the CPU of this machine
    "v6e-8"            a slice by its name in the cloud, "v5litepod-16", "v5p-8", "tpu7x-8"; needs libtpu, and no TPU
    "tpu:v6e:2x2"      a slice by generation and shape, hosts of 2x2 chips; or one chip, "tpu:v6e:1x1"
    "gpu:h200:2"       GPUs of one host, one where no number is given; needs jax's CUDA plugin, and no GPU

The platform may be left out, as in "v6e:8x8" and "h100:8", and "v5e-4" is "v5litepod-4".

Nothing but this file knows how a device that is not here is described to a compiler.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from ferrum_jax.io.paths import install_command

EXAMPLES = "cpu, v6e-8, v6e:8x8, h200, h100:8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cloud:
    """How the cloud names slices of a generation: NAME-n, in chips or in cores, `cores` to a chip.

    axes: of the shape of a slice. least: chips of the smallest.
    """

    generation: str
    axes: int
    cores: int = 1
    least: int = 1


_CLOUD = {
    "v4": _Cloud(generation="v4", axes=3, cores=2, least=4),
    "v5litepod": _Cloud(generation="v5e", axes=2),
    "v5p": _Cloud(generation="v5p", axes=3, cores=2, least=4),
    "v6e": _Cloud(generation="v6e", axes=2),
    "tpu7x": _Cloud(generation="TPU7x", axes=3, cores=2),
}
_ALIASES = {"v5e": "v5litepod"}
_CHIPS_OF_A_HOST = 8  # of a slice of two axes of one host; larger slices, and those of three axes, have hosts of 4
_LARGEST_SLICE = {2: 256, 3: 2048}  # chips, by axes

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
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""
_GPUS = {
    "h100": _HOPPER.format(bandwidth=3_350_000_000_000, memory=85_000_000_000, name="NVIDIA H100 80GB HBM3"),
    "h200": _HOPPER.format(bandwidth=4_800_000_000_000, memory=150_000_000_000, name="NVIDIA H200"),
}


def target_devices(target: str) -> Sequence[Any]:
    """The devices that a target's name stands for. For a TPU that is not here, libtpu wants to be told so by the
    environment (see `ferrum-jax compile`) before it is loaded; else it looks for one for minutes.

    Raises ValueError for a name that is none, and where the compiler that it needs is not installed.
    """
    platform, _, rest = with_platform(target).partition(":")
    if platform == "cpu" and not rest:
        return jax.devices("cpu")
    if platform == "tpu" and rest:
        return _tpus(target, rest)
    if _cloud_name(target)[0] in _CLOUD:
        return _tpus(target, *slice_of(target))
    kind, _, count = rest.partition(":")
    if platform == "gpu" and kind in _GPUS and (count or "1").isdecimal():
        shape = f"1x1x{count or 1}"  # processes x hosts x GPUS
        plugin = f"jax's CUDA plugin ({install_command('aot')})"
        return _describe("cuda", target, plugin, target_config=_GPUS[kind], topology=shape)
    known = f"GENERATION:SHAPE of TPUs, {'-N, '.join(_CLOUD)}-N, {'|'.join(_GPUS)}[:COUNT] or cpu"
    raise ValueError(f"target is {target!r}; it must be {known}, such as {EXAMPLES}")


def with_platform(target: str) -> str:
    """The target's name with its platform before it, where it names a generation and shape or a GPU without."""
    kind, _, rest = target.partition(":")
    if kind in _GPUS:
        return f"gpu:{target}"
    generations = {"tpu7x" if cloud.generation == "TPU7x" else cloud.generation: cloud for cloud in _CLOUD.values()}
    return f"tpu:{generations[kind].generation}:{rest}" if kind in generations and rest else target


def _cloud_name(target: str) -> tuple[str, str]:
    """The parts of a slice's cloud name before and behind its dash."""
    name, _, count = target.partition("-")
    return _ALIASES.get(name, name), count


def _tpus(target: str, topology: str, host: tuple[int, ...] | None = None) -> Sequence[Any]:
    """The devices of a topology such as v6e:2x2. host: chips of a host along each axis, None is the compiler's 2x2."""
    generation, _, shape = topology.partition(":")
    how: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    if re.fullmatch("1(x1){1,2}", shape):
        host = (1, 1, 1)
    if host is not None:
        how["chips_per_host_bounds"] = host
    known = "a generation and a shape of one chip or of whole hosts, such as tpu:v6e:2x2 or tpu:v5p:2x2x1"
    needs = known if importlib.util.find_spec("libtpu") else f"libtpu ({install_command('aot')})"
    return _describe("tpu", target, needs, topology_name=topology, **how)


def slice_of(target: str) -> tuple[str, tuple[int, ...] | None]:
    """Topology and chips of a host of a slice by its name in the cloud. Raises ValueError where there is none of it."""
    name, count = _cloud_name(target)
    cloud = _CLOUD[name]
    sizes = _slice_sizes(cloud)
    chips = int(count) // cloud.cores if count.isdecimal() and int(count) % cloud.cores == 0 else 0
    if chips not in sizes:
        unit = "cores" if cloud.cores > 1 else "chips"
        known = ", ".join(f"{name}-{n * cloud.cores}" for n in sizes)
        raise ValueError(
            f"target is {target!r}; slices of {name} are named by their {unit}: {known}; others by their shape, "
            f"such as tpu:{cloud.generation}:{_shape(16, cloud.axes)}"
        )
    is_one_host = cloud.axes == 2 and chips == _CHIPS_OF_A_HOST
    return f"{cloud.generation}:{_shape(chips, cloud.axes)}", (2, 4, 1) if is_one_host else None


def _slice_sizes(cloud: _Cloud) -> list[int]:
    """Chips of the slices that there are: one of some, and powers of two from a host's four on."""
    powers = (2**n for n in range(_LARGEST_SLICE[cloud.axes].bit_length()))
    return [chips for chips in powers if chips >= cloud.least and chips != 2]


def _shape(chips: int, axes: int) -> str:
    """The shape of a slice: axes as near to each other as powers of two allow, the shortest first; a host is flat."""
    if chips == 4 and axes == 3:
        return "2x2x1"
    powers, last = divmod(chips.bit_length() - 1, axes)
    return "x".join(str(2 ** (powers + (axis >= axes - last))) for axis in range(axes))


def _describe(platform: str, target: str, needs: str, **how: Any) -> Sequence[Any]:
    try:
        return topologies.get_topology_desc(platform=platform, **how).devices
    except Exception as error:  # plugins raise whatever they like
        raise ValueError(f"target {target!r} cannot be described: {error}; it needs {needs}") from error
