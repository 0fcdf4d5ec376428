"""Loading onto a mesh: every shard gets its own part, from either kind of folder."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from checkpoints import convert, fingerprint
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_single


def test_weights_load_onto_a_mesh_of_four_as_onto_one_device(tmp_path):
    made = tensors("bfloat16")
    convert(
        write_single(tmp_path / "hf", made),
        tmp_path / "out",
        rules=RULES,
        harmless=HARMLESS,
        targets=targets("bfloat16"),
    )
    root = Path(__file__).parents[2]
    devices = "--xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "tests/checkpoints/sharded_load.py", str(tmp_path / "hf"), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    expected = {name: value.astype("float32") for name, value in parameters(made).items()}
    values = b"".join(expected[name].tobytes() for name in sorted(expected))
    printed = json.loads(run.stdout)
    first, second = ["put on 0", "put on 2"], ["put on 1", "put on 3"]
    assert printed["order"] == ["read 4 rows from 0", *first, "read 4 rows from 12", *second]
    for found in printed["folders"]:
        assert found == {
            "fingerprint": fingerprint("spec", "float32", expected),
            "shards": {
                "embedding.weight": [75, 64],
                "layers.0.attention.q.weight": [10, 16],
                "layers.1.attention.q.weight": [10, 64],
                "layers.1.mlp.up": [3, 5, 16],
            },
            "values": hashlib.blake2b(values).hexdigest(),
        }
