"""Environment: what decides a compiled executable, whatever was asked to be compiled.

Two equal environments may exchange executables; of two that differ, `differences` says in what. It is read from a
device, a live one or one of a topology description, so that executables can be made where the device is not.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

TRACED = (  # the code from which a step is traced: all that the runtimes of engines and of encoders import
    "checkpoints/adapters",
    "checkpoints/formats",
    "checkpoints/names",
    "checkpoints/placement.py",
    "checkpoints/rules.py",
    "checkpoints/stored_weight.py",
    "ferrum_jax/config.py",
    "ferrum_jax/core/outputs.py",
    "ferrum_jax/core/plan.py",
    "ferrum_jax/core/request.py",
    "ferrum_jax/core/request_options.py",
    "ferrum_jax/inputs/audio/clip.py",
    "ferrum_jax/inputs/images/__init__.py",
    "ferrum_jax/inputs/images/image.py",
    "ferrum_jax/inputs/params",
    "ferrum_jax/inputs/prompt.py",
    "ferrum_jax/inputs/setting.py",
    "ferrum_jax/inputs/sizes",
    "ferrum_jax/io/error_text",
    "ferrum_jax/io/files",
    "ferrum_jax/io/ints.py",
    "ferrum_jax/io/paths.py",
    "ferrum_jax/io/system.py",
    "ferrum_jax/models/families",
    "ferrum_jax/models/layers",
    "ferrum_jax/models/sharding",
    "ferrum_jax/models/spec",
    "ferrum_jax/runtime",
    "ferrum_jax/runtime/compile",
    "ferrum_jax/runtime/distributed",
    "ferrum_jax/runtime/encoder_runtime.py",
    "ferrum_jax/runtime/lora",
    "ferrum_jax/runtime/media_encoders",
    "ferrum_jax/runtime/pools",
    "ferrum_jax/runtime/sampling",
    "ferrum_jax/sampling_params.py",
    "pallas_kernels",
    "pallas_kernels/paged_attention/tpu/decode/tiles.json",
)
JAX_OPTIONS = (  # of jax, those that change what is compiled
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_optimization_level",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """compiler: of the platform, with its version. instruction_set: of the CPU, where that is the device. sources: a
    digest of the code that is traced."""

    jax: str
    jaxlib: str
    flax: str
    platform: str
    device_kind: str
    compiler: str
    instruction_set: str
    xla_flags: str
    jax_options: str
    sources: str

    @classmethod
    def of_device(cls, device: Any) -> Environment:
        return cls(
            jax=jax.__version__,
            jaxlib=importlib.metadata.version("jaxlib"),
            flax=importlib.metadata.version("flax"),
            platform=device.platform,
            device_kind=device.device_kind,
            compiler=device.client.platform_version,
            instruction_set=_cpu_features() if device.platform == "cpu" else "",
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            jax_options=" ".join(f"{name}={jax.config.values[name]}" for name in JAX_OPTIONS),
            sources=_source_digest(),
        )

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> Environment:
        """Raises ValueError where the fields are not those of this class."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != names:
            raise ValueError(f"an environment has {sorted(names)}, and this one {sorted(fields)}")
        return cls(**fields)

    def differences(self, other: Environment) -> list[str]:
        """A phrase for each field in which `other` is not this one: "made with jax '0.12.0', here '0.10.2'"."""
        own, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"made with {name.replace('_', ' ')} {_short(others[name])!r}, here {_short(own[name])!r}"
            for name in own
            if own[name] != others[name]
        ]


def _short(text: str) -> str:
    """One line that a person reads; of long values, which differ somewhere, a digest."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"digest {hashlib.blake2b(line.encode(), digest_size=6).hexdigest()}"


@functools.cache
def _cpu_features() -> str:
    """The instruction set, to which a CPU executable belongs."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")


@functools.cache
def _source_digest() -> str:
    """Digests every source file that is traced."""
    state = hashlib.blake2b(digest_size=16)
    root = pathlib.Path(__file__).parents[3]
    for place in TRACED:
        for path in [root / place] if (root / place).is_file() else sorted((root / place).rglob("*.py")):
            state.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return state.hexdigest()
