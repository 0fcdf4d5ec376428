"""NVIDIA's disassembler: its place, and the machine code of kernels that jax compiles."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from unittest import mock

import jax


def tool(name: str) -> pathlib.Path:
    """The path of one of NVIDIA's tools, in its package or on PATH. Raises FileNotFoundError with what to install."""
    spec = importlib.util.find_spec("nvidia")
    places = [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = [path for place in places for path in sorted(place.glob(f"*/bin/{name}"))]
    if not found and (path := shutil.which(name)) is not None:
        found = [pathlib.Path(path).resolve()]
    if not found:
        raise FileNotFoundError(f"{name} is not here; pip install -c constraints.txt nvidia-cuda-{name}")
    return found[0]


def tools() -> dict[str, str]:
    """The compilers that the counts are of."""
    ptxas = shutil.which("ptxas")
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True).stdout if ptxas else ""
    version = re.search(r"V([\d.]+)", said)
    return {"jax": jax.__version__, "ptxas": version[1] if version else "not on PATH"}


@contextlib.contextmanager
def disassembled() -> Iterator[None]:
    """Has kernels that are compiled meanwhile printed as PTX and, with control codes, as machine code."""
    root = str(tool("nvdisasm").parents[1])
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_SASS_CTRL": "1"}
    with mock.patch.dict(os.environ, {**dumps, "MOSAIC_GPU_CUDA_ROOT": root, "CUDA_ROOT": root}):
        yield
