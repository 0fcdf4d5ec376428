"""Meshes of some devices: which a model fits, and how fast it is there at most, from shapes alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import AnySpec
from ferrum_jax.models.sharding import make_mesh, takes_all_hosts
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.encoder_forecast import AnyForecast
from ferrum_jax.planning.meshes.forecast import Lengths
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.runtime.placing.fit import TooSmall
from ferrum_jax.runtime.pools.budget import RESERVED_BYTES

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFit:
    """A model's fit on a mesh: a device's memory and the bounds of speed, or why it cannot run.

    memory_bytes: of a device, less what the runtime takes. other_bytes: of the largest step, slots and states. problem:
    why it cannot run; empty where it can. missing_bytes: where memory is the reason, by how much a device is too small.
    why_bounded: see `Layout`.
    """

    mesh: str
    weights_bytes: int | None = None
    kv_bytes: int = 0
    other_bytes: int = 0
    memory_bytes: int = 0
    kv_tokens: int = 0
    forecast: AnyForecast | None = None
    problem: str = ""
    missing_bytes: int = 0
    why_bounded: str = ""

    @property
    def rate(self) -> float:
        """Output tokens a second, or texts where none come out, at most; what meshes are ranked by."""
        return -1.0 if self.forecast is None else self.forecast.rate


def meshes_of(subject: Subject, devices: Sequence[Any], lengths: Lengths) -> list[MeshFit]:
    """The fit on each of `shapes_of` that leaves no host idle; [] on the CPU, whose devices share one memory."""
    if devices[0].platform == "cpu":
        return []
    shapes = [shape for shape in shapes_of(subject.spec, len(devices)) if leaves_none_idle(shape, devices)]
    return [on_mesh(subject, shape, devices, lengths) for shape in shapes]


def leaves_none_idle(shape: MeshShape, devices: Sequence[Any]) -> bool:
    """Whether every host has a device of the mesh, and every process."""
    first = {device.process_index for device in devices[: shape.size]}
    return takes_all_hosts(shape, devices) and first == {device.process_index for device in devices}


def shapes_of(spec: AnySpec, num_devices: int) -> list[MeshShape]:
    """Each number of devices along tp that divides all; then as many data shards of them as make all.

    Where a model has experts, these shards are there with experts over all devices, and with all experts in each.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    has_experts = isinstance(spec, ModelSpec) and spec.experts is not None
    once = [MeshShape(dp=num_devices // tp, tp=tp) for tp in sizes[:-1]]
    in_each = [dataclasses.replace(shape, has_experts_once=False) for shape in once] if has_experts else []
    return [*(MeshShape(tp=tp) for tp in sizes), *once, *in_each]


def on_mesh(subject: Subject, shape: MeshShape, devices: Sequence[Any], lengths: Lengths) -> MeshFit:
    """The subject's fit on a mesh of this shape, of the first devices."""
    named = str(shape)
    try:
        model = subject.with_mesh(named).on(make_mesh(shape, devices))
        found = model.forecast(lengths)
    except TooSmall as small:
        return MeshFit(
            mesh=named,
            weights_bytes=small.weights_bytes,
            memory_bytes=small.memory_bytes,
            problem=small.what.partition(":")[0],
            missing_bytes=small.missing_bytes,
        )
    except ValueError as error:
        return MeshFit(mesh=named, problem=str(error))
    ledger = model.layout.ledger
    return MeshFit(
        mesh=named,
        weights_bytes=ledger.weights_bytes,
        kv_bytes=ledger.kv_bytes,
        other_bytes=ledger.used_bytes - ledger.weights_bytes - ledger.kv_bytes,
        memory_bytes=model.layout.target.memory_bytes - RESERVED_BYTES,
        kv_tokens=ledger.kv_tokens,
        forecast=found,
        why_bounded=model.layout.why_bounded,
    )


def draw_meshes(path: Path, meshes: Sequence[MeshFit], title: str) -> None:
    """Writes the picture, in the format of the file's ending. A mesh that cannot run has no bar of its speed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.34 * len(meshes)), layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True)
    names, left = [mesh.mesh for mesh in meshes], [0.0] * len(meshes)
    for part in ("weights", "kv", "other"):
        sizes = [(getattr(mesh, f"{part}_bytes") or 0) / _GIB for mesh in meshes]
        memory.barh(names, sizes, left=left, label=part)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    memory.axvline(max(mesh.memory_bytes for mesh in meshes) / _GIB, color="red", label="what a device has")
    memory.invert_yaxis()
    memory.set_xlabel("GiB of a device")
    memory.legend()
    speed.barh(names, [max(mesh.rate, 0.0) for mesh in meshes])
    unit = next((mesh.forecast.unit for mesh in meshes if mesh.forecast is not None), "output tokens/s")
    speed.set_xlabel(f"{unit} at most")
    figure.suptitle(title)
    figure.savefig(path)
