"""Loading onto a mesh: every shard gets its own part, from either kind of folder.

A shard that two devices have alike is read once and put on both.
"""

import hashlib

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import convert, fingerprint, open_checkpoint, placement
from tests.checkpoints.folders import HARMLESS, RULES, SHAPES, parameters, targets, tensors, write_single
from tests.forked import call

SPECS = {
    "embedding.weight": PartitionSpec("tp", None),
    "layers.0.attention.q.weight": PartitionSpec(None, "tp"),
    "layers.1.attention.q.weight": PartitionSpec(),
    "layers.1.mlp.up": PartitionSpec(None, None, "tp"),
}


def describe(folder, mesh: Mesh) -> dict[str, object]:
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


def loaded(*folders) -> tuple[list[dict[str, object]], list[str]]:
    devices = np.array(jax.devices())
    return [describe(folder, Mesh(devices, ("tp",))) for folder in folders], order_of_placing(devices)


def test_weights_load_onto_a_mesh_of_four_as_onto_one_device(tmp_path):
    made = tensors("bfloat16")
    convert(
        write_single(tmp_path / "hf", made),
        tmp_path / "out",
        rules=RULES,
        harmless=HARMLESS,
        targets=targets("bfloat16"),
    )
    folders, order = call(loaded, tmp_path / "hf", tmp_path / "out", devices=4)
    expected = {name: value.astype("float32") for name, value in parameters(made).items()}
    values = b"".join(expected[name].tobytes() for name in sorted(expected))
    first, second = ["put on 0", "put on 2"], ["put on 1", "put on 3"]
    assert order == ["read 4 rows from 0", *first, "read 4 rows from 12", *second]
    for found in folders:
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
