"""Run as a process of its own: loads a checkpoint of one [ROWS, 1024] matrix a layer and prints, as JSON, what it cost.

    python peak_memory.py FOLDER NUM_LAYERS DTYPE ROWS

Each matrix is divided among all devices by its rows. DTYPE may be a form that dense weights are given.
loaded_bytes: the model's own size in DTYPE. peak_bytes: most anonymous memory above what it was before. device_bytes:
what each device has.
"""

import json
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints import Rule, TensorSlice, open_checkpoint
from checkpoints.formats import mxfp4
from checkpoints.stored_weight import made_form


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Samples anonymous memory every millisecond until `stop` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = self.highest = anonymous_bytes()
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.001):
            self.highest = max(self.highest, anonymous_bytes())


def main(folder: str, num_layers: int, dtype: str, num_rows: int) -> None:
    layers = tuple(range(num_layers))
    form = mxfp4.FORM if dtype == "mxfp4" else made_form(dtype) if dtype.startswith("int") else None
    packed = {} if form is None else form.leaves((num_rows, 1024))
    source = "model.layers.{i}.experts.w" if dtype == "mxfp4" else "model.layers.{i}.weight"
    part = TensorSlice(transposed=True) if dtype == "mxfp4" else None
    rules = (Rule(source=source, target="layers.{i}.weight", layers=layers, part=part),)
    devices = np.array(jax.devices())
    rows = NamedSharding(Mesh(devices, ("tp",)), PartitionSpec("tp")) if len(devices) > 1 else None
    leaves = {f".{leaf}": own for leaf, own in packed.items()} or {"": ((num_rows, 1024), dtype)}
    targets = {
        f"layers.{i}.weight{leaf}": jax.ShapeDtypeStruct(*own, sharding=rows)
        for i in layers
        for leaf, own in leaves.items()
    }
    checkpoint = open_checkpoint(folder)
    jnp.zeros(()).block_until_ready()
    peak = Peak()
    peak.start()
    params = checkpoint.load(rules=rules, harmless=(), targets=targets)
    peak.stop.set()
    peak.join()
    loaded = sum(array.nbytes for array in params.values())
    # A checksum over all rows, so that the caller sees that the weights are the right ones; of bytes over all of them.
    total = float(sum(np.asarray(array if packed else array[:, 0], np.float64).sum() for array in params.values()))
    shards = [shard for array in params.values() for shard in array.addressable_shards]
    on_devices = [sum(shard.data.nbytes for shard in shards if shard.device == device) for device in devices]
    found = {"loaded_bytes": loaded, "peak_bytes": peak.highest - peak.base, "device_bytes": on_devices}
    print(json.dumps(found | {"total": total}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
