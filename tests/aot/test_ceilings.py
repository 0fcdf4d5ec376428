"""What is compiled for Hopper and for TPUs is not worse than what is kept of it, by the ruler of each."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from ferrum_jax.cli.device_check.estimates import TPU_CEILINGS
from pallas_kernels.paged_attention.gpu.ceilings import FILE as GPU_CEILINGS
from scripts import kept_counts
from tests.rows import rows_beside

pytestmark = pytest.mark.aot
GPU, TPU = (kept_counts.read(path) for path in (GPU_CEILINGS, TPU_CEILINGS))
# on TPUs a launch of every kernel, for all generations in 30 CPU seconds or less
QUICK = rows_beside(__file__)["quick"]


LAUNCHES = [
    pytest.param(ruler, name, marks=() if name in QUICK[ruler] else pytest.mark.slow, id=f"{ruler}-{name}")
    for ruler, kept in (("gpu_ceiling", GPU), ("tpu_ceiling", TPU))
    for name in kept["launches"]
]


@pytest.mark.parametrize(("ruler", "name"), LAUNCHES)
def test_no_count_is_worse_than_what_is_kept(ruler, name):
    """In a process of its own: a kernel that one has compiled before is not printed again."""
    kept = (GPU if ruler == "gpu_ceiling" else TPU)["tools"]
    here = {"jax": jax.__version__}
    if ruler == "tpu_ceiling":
        here["libtpu"] = importlib.metadata.version("libtpu")
    if other := {tool: (kept[tool], version) for tool, version in here.items() if kept[tool] != version}:
        pytest.skip(f"counts are of other compilers, which lower kernels in their own way (kept, here): {other}")
    command = [sys.executable, "-m", f"scripts.{ruler}", "--check", name]
    ended = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
