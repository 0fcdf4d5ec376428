"""Run as a process of its own with several CPU devices: loads onto a mesh and prints what it found, as JSON.

python sharded_load.py FOLDER...        for each: fingerprint, shard shapes, and a digest of all values
"""

import hashlib
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import fingerprint, open_checkpoint
from tests.checkpoints.folders import HARMLESS, RULES, SHAPES

SPECS = {
    "embedding.weight": PartitionSpec("tp", None),
    "layers.0.attention.q.weight": PartitionSpec(None, "tp"),
    "layers.1.attention.q.weight": PartitionSpec(),
    "layers.1.mlp.up": PartitionSpec(None, None, "tp"),
}


def describe(folder: str, mesh: Mesh) -> dict[str, object]:
    targets = {
        name: jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, SPECS[name]))
        for name, shape in SHAPES.items()
    }
    params = open_checkpoint(folder).load(rules=RULES, harmless=HARMLESS, targets=targets)
    assert all(array.sharding == targets[name].sharding for name, array in params.items())
    values = b"".join(np.asarray(params[name]).tobytes() for name in sorted(params))
    return {
        "fingerprint": fingerprint("spec", "float32", params),
        "shards": {name: list(array.addressable_shards[0].data.shape) for name, array in params.items()},
        "values": hashlib.blake2b(values).hexdigest(),
    }


if __name__ == "__main__":
    tp_mesh = Mesh(np.array(jax.devices()), ("tp",))
    print(json.dumps([describe(folder, tp_mesh) for folder in sys.argv[1:]]))
