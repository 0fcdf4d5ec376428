"""The picture of `ferrum-jax plan --plot`: the memory of a device and the speed of all, for each mesh of a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ferrum_jax.planning.meshes.choices import MeshFit

_GIB = 2**30


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
