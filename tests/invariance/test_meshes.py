"""All ways of reuse on several meshes, in a process with simulated devices, each step within the guard of writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support import GOLDENS, ROOT


@pytest.fixture(scope="module")
def meshes() -> list[dict]:
    environment = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    run = subprocess.run(
        [sys.executable, "tests/invariance/mesh_matrix.py", "llama_linear", "tp=1", "tp=2", "dp=2"],
        env=os.environ | environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(run.stdout)


@pytest.mark.slow
def test_tokens_and_logits_are_equal_for_any_reuse_chunks_tier_and_mesh(meshes):
    """On one mesh the process has compared bits; between meshes logits agree to 1e-5 of the largest."""
    one, *others = meshes
    with np.load(GOLDENS / "llama_linear" / "golden.npz") as golden:
        error = 1e-5 * np.abs(golden["last_logits"]).max()
    for two in others:
        assert two["tokens"] == one["tokens"]
        for row, expected in zip(two["logprobs"], one["logprobs"], strict=True):
            found, wanted = np.array(row), np.array(expected)
            np.testing.assert_array_equal(found[..., 0], wanted[..., 0])
            np.testing.assert_allclose(found[..., 1], wanted[..., 1], rtol=0, atol=error)
    for mesh in meshes:
        for name, metrics in mesh["metrics"].items():
            assert metrics["hits"] and metrics["saved_prefill_tokens"], name
            assert bool(metrics["preemptions"]) == ("preemption" in name), name
            assert bool(metrics["loaded_blocks"]) == ("tier" in name), name


@pytest.mark.slow
def test_one_device_and_n_devices_of_one_shard_have_equal_tables_and_plans(meshes):
    one, two, _ = meshes
    twice = {  # the model's one KV head is on both devices, and in the host memory of both
        name: metrics | {"host_bytes": 2 * metrics["host_bytes"]} for name, metrics in one["metrics"].items()
    }
    assert two["plans"] == one["plans"] and two["metrics"] == twice
