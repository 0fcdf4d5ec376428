"""The picture of `ferrum-jax plan --plot`: the memory of a device and the speed of all, for each mesh of a target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ferrum_jax.meshes.choices import MeshFit

_GIB = 2**30
_PARTS = (("weights", "tab:blue"), ("KV pool", "tab:green"), ("step, slots and states", "tab:gray"))


def draw_meshes(path: Path, meshes: Sequence[MeshFit], title: str) -> None:
    """Writes the picture, in the format of the file's ending. Meshes that cannot run have a word in place of a bar."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.9 + 0.34 * len(meshes)), dpi=120, layout="constrained")
    memory, speed = figure.subplots(1, 2, sharey=True, width_ratios=(1.15, 1))
    places = range(len(meshes))
    _draw_memory(memory, meshes)
    _draw_speed(speed, meshes)
    memory.set_yticks(places, [mesh.mesh for mesh in meshes])
    memory.invert_yaxis()
    for axes in (memory, speed):
        axes.grid(visible=True, axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _draw_memory(axes, meshes: Sequence[MeshFit]) -> None:
    parts = [(mesh.weights_bytes or 0, mesh.kv_bytes, mesh.other_bytes) for mesh in meshes]
    there = max((mesh.memory_bytes for mesh in meshes), default=0) / _GIB
    left = [0.0] * len(meshes)
    for number, (name, color) in enumerate(_PARTS):
        sizes = [each[number] / _GIB for each in parts]
        if any(sizes):
            axes.barh(range(len(meshes)), sizes, left=left, height=0.62, color=color, label=name)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    for place, mesh in enumerate(meshes):
        if mesh.missing_bytes:  # whose bar does not end in the picture
            text = f"weights of {parts[place][0] / _GIB:,.1f} GiB"
            axes.text(there * 0.02, place, text, va="center", fontsize=9, color="white")
    axes.axvline(there, color="tab:red", linewidth=1.2, linestyle="--", label="what a device has")
    axes.set_xlim(0, there * 1.12)
    axes.set_xlabel("GiB of a device")


def _draw_speed(axes, meshes: Sequence[MeshFit]) -> None:
    rates = [max(mesh.rate, 0.0) for mesh in meshes]
    best = max(rates, default=0.0)
    colors = ["tab:orange" if rate == best else "navajowhite" for rate in rates]
    axes.barh(range(len(meshes)), rates, height=0.62, color=colors)
    for place, (mesh, rate) in enumerate(zip(meshes, rates, strict=True)):
        text = f"{rate:,.0f}" if not mesh.problem else "too small" if mesh.missing_bytes else "cannot run"
        axes.text(
            rate + best * 0.02, place, text, va="center", fontsize=9, color="tab:red" if mesh.problem else "black"
        )
    axes.set_xlim(0, (best or 1.0) * 1.25)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="x", nbins=4)
    unit = next((mesh.forecast.unit for mesh in meshes if mesh.forecast is not None), "output tokens/s")
    axes.set_xlabel(f"{unit} at most")
