"""The store: compiled executables on disk, so that a second start neither traces nor compiles.

One file per executable, named by a digest of everything that decides it: the code that is traced, versions,
device, compiler flags, and the arguments of its making. Files are written beside and renamed, so that
processes may share a folder. A file begins with a digest of the rest and is not even unpickled if that is
another: a damaged executable would crash the process. A file is code: a folder that others may write to is refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import pickle
import stat
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

TRACED = (  # the code from which a step is traced: all that runtime/ imports
    "checkpoints/rules.py",
    "ferrum_jax/cache",
    "ferrum_jax/config.py",
    "ferrum_jax/ints.py",
    "ferrum_jax/layers",
    "ferrum_jax/models",
    "ferrum_jax/plan.py",
    "ferrum_jax/prompt.py",
    "ferrum_jax/request.py",
    "ferrum_jax/runtime",
    "ferrum_jax/sampling",
    "ferrum_jax/sharding.py",
    "ferrum_jax/spec.py",
    "pallas_kernels",
)
_OPTIONS = (  # of jax, those that change what is compiled
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_optimization_level",
)
_CHECK_BYTES = 32


class ExecutableStore:
    """Executables by description. `hits` and `misses` count what was asked for.

    devices: of the mesh that they run on, in its order; None for the default device.
    Raises ValueError if the folder belongs to somebody else or others may write to it.
    """

    def __init__(self, folder: str, devices: Sequence[Any] | None = None) -> None:
        self._devices = list(devices or jax.devices()[:1])
        self._folder = pathlib.Path(folder).expanduser()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = self._folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ValueError(
                f"compilation_cache_dir is {self._folder}, and others can write to it; what lies there is run as "
                "code: make it yours alone (chmod 700), or choose another"
            )
        self.hits = 0
        self.misses = 0

    def get(self, description: str, compile: Callable[[], Any]) -> Any:
        """The executable that `description` names, from disk, or compiled and kept.

        description: all that decides it beside code, versions and device; equal text must mean equal programs.
        A damaged file is compiled again and replaced.
        """
        ids = [device.id for device in self._devices]
        path = self._folder / f"{_digest(f'{ids} {description}')}.executable"
        payload = _read(path)
        if payload is not None:
            self.hits += 1
            return serialize_executable.deserialize_and_load(*pickle.loads(payload), execution_devices=self._devices)
        executable = compile()
        self.misses += 1
        _write(path, pickle.dumps(serialize_executable.serialize(executable)))
        return executable


def _read(path: pathlib.Path) -> bytes | None:
    """What was written to the file; None if there is none or it is damaged."""
    if not path.exists():
        return None
    data = path.read_bytes()
    check, payload = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    return payload if check == _check(payload) else None


def _write(path: pathlib.Path, payload: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(_check(payload) + payload)
    os.replace(file.name, path)


def _check(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECK_BYTES).digest()


def _digest(description: str) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in (_environment(), description):
        state.update(len(part).to_bytes(8, "little") + part.encode())
    return state.hexdigest()


@functools.cache
def _environment() -> str:
    """What decides an executable in this process whatever it is asked to compile."""
    device = jax.devices()[0]
    host = _cpu_features() if device.platform == "cpu" else ""
    return repr(
        (
            jax.__version__,
            importlib.metadata.version("jaxlib"),
            importlib.metadata.version("flax"),
            device.platform,
            device.device_kind,
            device.client.platform_version,
            host,
            os.environ.get("XLA_FLAGS", ""),
            [(name, str(jax.config.values[name])) for name in _OPTIONS],
            _source_digest(),
        )
    )


def _cpu_features() -> str:
    """The instruction set, to which a CPU executable belongs."""
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), "")


def _source_digest() -> str:
    """Of every source file that is traced."""
    state = hashlib.blake2b(digest_size=16)
    root = pathlib.Path(__file__).parent.parent.parent
    for place in TRACED:
        for path in [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py")):
            state.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return state.hexdigest()
