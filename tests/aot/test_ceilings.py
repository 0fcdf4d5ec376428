"""The machine code of the Hopper kernels is not worse than what is kept of it."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from scripts import gpu_ceiling
from scripts.gpu_launches import launches

pytestmark = pytest.mark.aot
QUICK = ("llama_8b_decode_c16", "oss_prefill", "llama_8b_mixed_fp8_e4m3", "product_mxfp4_16")


def _names() -> list:
    names = [launch.name for launch in launches()]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _names())
def test_no_count_is_worse_than_what_is_kept(name):
    """In a process of its own, because a kernel that one has compiled before is not printed again."""
    if (kept := gpu_ceiling.kept()["tools"]["jax"]) != jax.__version__:
        pytest.skip(f"counts are kept of jax {kept}; here is {jax.__version__}, which lowers kernels in its own way")
    command = [sys.executable, "-m", "scripts.gpu_ceiling", "--check", name]
    ended = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
