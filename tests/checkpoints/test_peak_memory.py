"""Loading streams: peak anonymous host memory stays under the model's own size, which is in it on the CPU, plus 10 %.

On a mesh under that size plus the largest shard and a small buffer.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from checkpoints import Rule, convert

BUFFER_BYTES = 4 << 20


def write(folder, num_layers, stored, num_rows=1024):
    """(folder, sum of the first columns) of a Hugging Face folder with one [num_rows, 1024] matrix a layer."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    random = np.random.default_rng(0)
    made = {
        f"model.layers.{i}.weight": random.standard_normal((num_rows, 1024), np.float32).astype(jnp.dtype(stored))
        for i in range(num_layers)
    }
    safetensors.numpy.save_file(made, folder / "model.safetensors")
    return folder, sum(float(value[:, 0].astype(np.float64).sum()) for value in made.values())


def measure(folder, num_layers, dtype, num_devices=1, num_rows=1024):
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "tests/checkpoints/peak_memory.py", str(folder), str(num_layers), dtype, str(num_rows)],
        env=os.environ
        | {
            "PYTHONPATH": str(root),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        },
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)


def check(folder, num_layers, dtype, total):
    found = measure(folder, num_layers, dtype)
    assert found["total"] == pytest.approx(total)
    assert found["peak_bytes"] <= 1.1 * found["loaded_bytes"]


def test_a_load_with_a_cast_peaks_under_the_models_size_plus_ten_percent(tmp_path):
    folder, total = write(tmp_path / "hf", 25, "bfloat16")
    check(folder, 25, "float32", total)


@pytest.mark.slow
def test_a_load_onto_eight_devices_puts_an_eighth_on_each(tmp_path):
    """Three matrices of 64 MB each: one that was whole anywhere, on the host or a device, would be seen."""
    folder, total = write(tmp_path / "hf", 3, "bfloat16", num_rows=1 << 14)
    found = measure(folder, 3, "float32", num_devices=8, num_rows=1 << 14)
    assert found["total"] == pytest.approx(total)
    assert found["device_bytes"] == [found["loaded_bytes"] // 8] * 8
    shard_bytes = (1 << 14) * 1024 * 4 // 8
    assert found["peak_bytes"] <= found["loaded_bytes"] + shard_bytes + BUFFER_BYTES


@pytest.mark.slow
def test_a_load_without_a_cast_peaks_under_the_models_size_plus_ten_percent(tmp_path):
    folder, total = write(tmp_path / "hf", 40, "float32")
    check(folder, 40, "float32", total)


@pytest.mark.slow
def test_a_load_of_mxfp4_weights_peaks_under_the_models_size_plus_ten_percent(tmp_path):
    folder, total, random = tmp_path / "hf", 0.0, np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    made = {}
    for i in range(180):
        blocks, scales = (random.integers(120, 134, shape, np.uint8) for shape in ((1024, 32, 16), (1024, 32)))
        made |= {f"model.layers.{i}.experts.w_blocks": blocks, f"model.layers.{i}.experts.w_scales": scales}
        total += float(blocks.sum(dtype=np.int64) + scales.sum(dtype=np.int64))
    safetensors.numpy.save_file(made, folder / "model.safetensors")
    check(folder, 180, "mxfp4", total)


@pytest.mark.slow
def test_a_load_that_quantises_peaks_at_the_packed_size_a_leaf_and_a_run_of_outputs(tmp_path):
    """Two matrices of 256 MB in float32: one that was whole anywhere would be seen."""
    folder, _ = write(tmp_path / "hf", 2, "bfloat16", num_rows=1 << 16)
    found = measure(folder, 2, "int4-g128", num_rows=1 << 16)
    assert found["loaded_bytes"] == 2 * (1 << 16) * (512 + 16)
    run = 6 * 4 * (1 << 22)
    assert found["peak_bytes"] <= found["loaded_bytes"] + (1 << 16) * 512 + run + BUFFER_BYTES


@pytest.mark.slow
def test_a_load_of_our_own_folder_peaks_under_the_models_size_plus_ten_percent(tmp_path):
    layers = tuple(range(140))
    folder, total = write(tmp_path / "hf", 140, "bfloat16")
    check(convert_to_ours(folder, tmp_path / "out", layers, 1024), 140, "float32", total)


@pytest.mark.slow
def test_a_load_of_our_own_folder_onto_eight_devices_takes_few_chunks(tmp_path):
    """One matrix of 512 MB in float32, which Orbax's own restore holds twice."""
    num_rows = 1 << 17
    folder, total = write(tmp_path / "hf", 1, "bfloat16", num_rows=num_rows)
    ours = convert_to_ours(folder, tmp_path / "out", (0,), num_rows)
    found = measure(ours, 1, "float32", num_devices=8, num_rows=num_rows)
    assert found["total"] == pytest.approx(total)
    assert found["device_bytes"] == [found["loaded_bytes"] // 8] * 8
    chunks = 2 * min(os.cpu_count(), 8) * (32 << 20)  # one a core, each as it is stored and as it is read
    assert found["peak_bytes"] <= found["loaded_bytes"] + found["loaded_bytes"] // 8 + chunks


def convert_to_ours(folder, out, layers, num_rows):
    rules = (Rule(source="model.layers.{i}.weight", target="layers.{i}.weight", layers=layers),)
    targets = {f"layers.{i}.weight": jax.ShapeDtypeStruct((num_rows, 1024), "bfloat16") for i in layers}
    convert(folder, out, rules=rules, harmless=(), targets=targets)
    return out
