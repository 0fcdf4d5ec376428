"""An engine on a mesh says what it says on one device. Each case is a process with simulated devices."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support import GOLDENS, ROOT

# Few KV heads and an uneven vocabulary on four devices: heads are repeated, the vocabulary is padded; then experts,
# recurrent layers, sinks and biased experts, fused projections.
CASES = [("llama_linear", "tp=4"), ("qwen3_moe_raw", "tp=3"), ("mixtral_window", "tp=4"), ("qwen3_next", "tp=4")]
CASES += [("mistral", "tp=4"), ("gemma2", "tp=4"), ("gemma3", "tp=4"), ("gpt_oss_mxfp4", "tp=4"), ("phi3", "tp=4")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), CASES)
def test_tokens_and_hits_on_a_mesh_equal_those_of_one_device_and_logits_agree_to_1e_5(family, mesh):
    """Of the largest logit: log-probabilities are differences of logits, and on one device another bucket moves
    them as much."""
    one, many = run_on(family, "tp=1", mesh)
    with np.load(GOLDENS / family / "golden.npz") as golden:
        error = 1e-5 * np.abs(golden["last_logits"]).max()
    assert one["cached"][2] == 32, "the third prompt hits the first one's blocks"
    assert one["cached"][4] == 39, "the last prompt repeats the first one, tail and all"
    for what in ("tokens", "cached", "fingerprint"):
        assert many[what] == one[what], what
    for entry, expected in zip(many["logprobs"], one["logprobs"], strict=True):
        assert [token for token, _ in entry] == [token for token, _ in expected]
        np.testing.assert_allclose([p for _, p in entry], [p for _, p in expected], rtol=0, atol=error)
    assert (one["cached_from_disk"], many["cached_from_disk"]) == (0, 39), (
        "blocks and hidden states are the same on every mesh"
    )
    assert many["weights_bytes"] < one["weights_bytes"]
    num_heads = json.loads((GOLDENS / family / "config.json").read_text())["num_key_value_heads"]
    copies = {"tp=4": 4 // num_heads}.get(mesh, 1)
    assert many["kv_repeated_bytes"] == many["kv_bytes"] * (copies - 1) // copies, "each head on so many devices"


def run_on(family: str, *meshes: str) -> list[dict]:
    environment = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    run = subprocess.run(
        [sys.executable, "tests/sharding/mesh_run.py", family, *meshes],
        env=os.environ | environment,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout)
