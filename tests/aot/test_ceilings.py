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

pytestmark = pytest.mark.aot
GPU, TPU = (kept_counts.read(path) for path in (GPU_CEILINGS, TPU_CEILINGS))
QUICK = {
    "gpu_ceiling": ("llama_8b_decode_c16", "oss_prefill", "llama_8b_mixed_fp8_e4m3", "product_mxfp4_16"),
    # a launch of every kernel, for all generations in 30 CPU seconds or less
    "tpu_ceiling": (
        "llama_8b_decode_c16",
        "llama_8b_decode_c128",
        "llama_8b_decode_int8",
        "llama_8b_decode_fp8",
        "deepseek_v3_decode",
        "deepseek_v3_verify",
        "llama_8b_prefill_c128",
        "product_int8_a16_16",
        "product_int8_a16_64",
        "product_int4_g128_16",
        "product_int4_g128_64",
        "product_int4_g128_512",
        "product_int8_512",
        "xla_product_bf16_512",
        "indexer_32k",
        "gated_delta_decode_64",
        "kda_decode_64",
        "mamba2_decode_64",
    ),
}


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
