"""What a model says on meshes, each run in a process with simulated devices, and when that is the same."""

import json
import os
import subprocess
import sys

import numpy as np

from ferrum_jax.sizes.mesh_shape import MeshShape
from tests.support import GOLDENS, ROOT

# Four devices; and LLVM does not optimise, which changes no program but halves the time of compiling it.
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def run_on(name: str, *meshes: str, program: str = "mesh_run.py") -> list[dict]:
    """What a program of this folder prints of a golden folder's model on each mesh."""
    environment = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    run = subprocess.run(
        [sys.executable, f"tests/sharding/{program}", name, *meshes],
        env=os.environ | environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(run.stdout)


def assert_same(family: str, mesh: str, one: dict, many: dict) -> None:
    """Tokens are equal, and logits agree to 1e-5 of the largest.

    Log-probabilities are differences of logits, and on one device another bucket moves them as much.
    """
    with np.load(GOLDENS / family / "golden.npz") as golden:
        error = 1e-5 * np.abs(golden["last_logits"]).max()
    for what in ("tokens", "fingerprint"):
        assert many[what] == one[what], f"{what} on {mesh}"
    for entry, expected in zip(many["logprobs"], one["logprobs"], strict=True):
        assert [token for token, _ in entry] == [token for token, _ in expected], mesh
        np.testing.assert_allclose([p for _, p in entry], [p for _, p in expected], rtol=0, atol=error, err_msg=mesh)
    assert one["cached"][2:] == [32, 0, 39], "the third prompt hits the first one's blocks, the last repeats it whole"
    if MeshShape.parse(mesh).dp == 1:
        assert many["cached"] == one["cached"], mesh
    else:
        assert many["cached"][2] == 32 and many["cached"][4] >= 16, (
            "those who hit run where the blocks are, or the scored"
        )
    assert (one["cached_from_disk"], many["cached_from_disk"]) == (0, 39), (
        "blocks and hidden states are the same on every mesh"
    )
    assert one["preemptions"] and many["preemptions"], mesh
    assert many["pools_are_aliased"], mesh
    for unexpected in (*one["unexpected_collectives"], *many["unexpected_collectives"]):
        assert not unexpected, "\n".join((mesh, *unexpected))
