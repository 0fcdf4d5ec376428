"""A job on a Ray cluster has the bytes of one without Ray."""

import json
import re
import subprocess
import sys

import pytest

from ferrum_jax.batch.ray import run_batch_on_ray
from ferrum_jax.io.paths import install_command
from tests.support import ROOT


@pytest.mark.ray
def test_a_ray_job_with_a_killed_actor_has_the_bytes_of_one_without_ray():
    command = [sys.executable, "-m", "tests.batch.ray_program"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["killed"] and found["actors"] > 2


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=f"a job on Ray needs Ray Data .*; {re.escape(install_command('ray'))}"):
        run_batch_on_ray(lambda: None, tmp_path / "in", tmp_path / "out", num_actors=2, model="m")
