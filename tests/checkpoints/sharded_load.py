"""Run as a process of its own with several CPU devices: loads onto a mesh and prints what it found, as JSON.

python sharded_load.py FOLDER...        for each: fingerprint, shard shapes, and a digest of all values

And in which order the shards of a tensor that two devices each have alike are read and put there.
"""

import hashlib
import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import fingerprint, open_checkpoint, placement
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


class Recorded:
    """A tensor on disk that notes which of its rows are read."""

    shape, dtype = (8, 3), np.dtype("float32")

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        rows = np.arange(24, dtype=np.float32).reshape(8, 3)[index]
        self.events.append(f"read {len(rows)} rows from {rows[0, 0]:g}")
        return rows


def order_of_placing(devices: np.ndarray) -> list[str]:
    events: list[str] = []
    put = jax.device_put

    def recorded(piece: np.ndarray, device: jax.Device) -> jax.Array:
        events.append(f"put on {device.id}")
        return put(piece, device)

    placement.jax.device_put = recorded
    mesh = Mesh(devices.reshape(2, 2), ("dp", "tp"))
    target = jax.ShapeDtypeStruct((8, 3), "float32", sharding=NamedSharding(mesh, PartitionSpec("tp")))
    placed = placement.place([Recorded(events)], target)
    np.testing.assert_array_equal(placed, np.arange(24, dtype=np.float32).reshape(8, 3))
    return events


if __name__ == "__main__":
    devices = np.array(jax.devices())
    found = [describe(folder, Mesh(devices, ("tp",))) for folder in sys.argv[1:]]
    print(json.dumps({"folders": found, "order": order_of_placing(devices)}))
