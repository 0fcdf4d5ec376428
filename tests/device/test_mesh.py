"""The TPU's kernels on four simulated devices: heads over "tp", rows and blocks over "dp"."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT

CASES = ("decode_gqa", "decode_h96_window_sinks", "mixed_mha_h64", "mixed_gqa")


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """What each case gave, all in one process."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "NPROC": "16",  # threads of XLA:CPU: interpreted devices wait for one another, so that fewer never end
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.device.mesh_program", *CASES],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_shards_rows_attend_and_write_as_if_alone(results):
    assert set(results) == set(CASES)
    for name, result in results.items():
        assert not result["races"], name
        assert max(result["errors"]) <= 1, name
        assert result["changed"] == result["written"], name
