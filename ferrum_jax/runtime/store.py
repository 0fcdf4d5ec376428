"""The store: compiled executables on disk, so that a second start neither traces nor compiles.

One file per executable, named by a digest of everything that decides it: the code of the packages, versions,
device, compiler flags, and the arguments of its making. Files are written beside and renamed, so that
processes may share a folder. A file is code: a folder that others may write to is refused.
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
from collections.abc import Callable
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

_PACKAGES = ("ferrum_jax", "pallas_kernels")
_OPTIONS = (  # of jax, those that change what is compiled
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_optimization_level",
)
_BROKEN = (EOFError, ValueError, pickle.UnpicklingError, OSError)  # what a damaged file can raise


class ExecutableStore:
    """Executables by description. `hits` and `misses` count what was asked for.

    Raises ValueError if the folder belongs to somebody else or others may write to it.
    """

    def __init__(self, folder: str) -> None:
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
        path = self._folder / f"{_digest(description)}.executable"
        if path.exists():
            try:
                payload = pickle.loads(path.read_bytes())
                executable = serialize_executable.deserialize_and_load(*payload)
            except _BROKEN:
                path.unlink(missing_ok=True)
            else:
                self.hits += 1
                return executable
        executable = compile()
        self.misses += 1
        _write(path, pickle.dumps(serialize_executable.serialize(executable)))
        return executable


def _write(path: pathlib.Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


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
            jaxlib.__version__,
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
    """Of every source file of the packages whose code is traced."""
    state = hashlib.blake2b(digest_size=16)
    root = pathlib.Path(__file__).parent.parent.parent
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            state.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return state.hexdigest()
