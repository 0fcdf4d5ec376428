"""Settling: which mesh an engine takes where its config leaves that open.

It is the fastest of those that fit, as `ferrum-jax plan` ranks them: by the bound of output tokens a second, for
requests of the lengths that it has by default. All of it follows from shapes and memory, so every process finds the
same. The CPU's devices share one memory and its cores, so there a mesh is taken only where it is named.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.planning.meshes.choices import MeshFit, meshes_of
from ferrum_jax.planning.meshes.forecast import Lengths
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.runtime.placing.fit import larger_slices


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshChoice:
    """mesh: as EngineConfig has it. why: a sentence where it was chosen among several; else empty."""

    mesh: str
    why: str = ""


def choose_mesh(subject: Subject, devices: Sequence[Any], *, meshes: Sequence[MeshFit] | None = None) -> MeshChoice:
    """The mesh that a config names, else the one that is taken of these devices.

    meshes: what `meshes_of` gives, where it is known. Raises ValueError with a sentence where none fits.
    """
    config = subject.config
    if config.mesh is not None:
        return MeshChoice(mesh=config.mesh)
    if len(devices) == 1 or devices[0].platform == "cpu":
        return MeshChoice(mesh=str(MeshShape()))
    found = meshes_of(subject, devices, Lengths()) if meshes is None else meshes
    best = best_of(found)
    if best.problem:
        raise ValueError(none_fits(subject, found, len(devices)) + _quantised(subject, devices))
    return MeshChoice(mesh=best.mesh, why=_why(best, sum(not each.problem for each in found), len(devices)))


def best_of(meshes: Sequence[MeshFit]) -> MeshFit:
    """The fastest that fits, where one does; of equals that of the largest pool."""
    return max(meshes, key=lambda each: (each.rate, each.kv_tokens))


def _why(best: MeshFit, num_fitting: int, num_devices: int) -> str:
    found = best.forecast
    assert found is not None, "a mesh that fits has one"
    out = f" and {found.tokens_out:,} out" if found.tokens_out else ""
    rank = f"the fastest of {num_fitting} that fit" if num_fitting > 1 else "the only one that fits"
    return (
        f"mesh {best.mesh} is taken of {num_devices} devices: {rank}, for {found.tokens_in:,} tokens in{out} at most "
        f"{best.rate:,.0f} {found.unit}; --mesh names another"
    )


def _quantised(subject: Subject, devices: Sequence[Any]) -> str:
    """How it fits with weights of 8 bits; empty where it does not, or its config names a form."""
    if subject.config.weights != "auto":
        return ""
    best = best_of(meshes_of(subject.with_fields(weights="int8"), devices, Lengths()))
    return "" if best.problem else f"; with --weights int8 it fits these, on mesh {best.mesh}"


def none_fits(subject: Subject, meshes: Sequence[MeshFit], num_devices: int) -> str:
    """Why none of the meshes can run the model, in one sentence: by how much the nearest is too small, else why not."""
    small = [each for each in meshes if each.missing_bytes]
    if not small:
        return f"no mesh of these {num_devices} devices runs it: {'; '.join(by_problem(meshes))}"
    nearest = min(small, key=lambda each: each.missing_bytes)
    assert nearest.weights_bytes is not None and isinstance(subject.spec, ModelSpec)
    larger = larger_slices(
        subject.spec, subject.with_mesh(nearest.mesh).config.mesh_shape, nearest.weights_bytes, nearest.missing_bytes
    )
    return (
        f"it does not fit these {num_devices} devices: the nearest mesh, {nearest.mesh}, is {nearest.problem} a "
        f"device, whose {nearest.memory_bytes / 2**30:.2f} GiB have weights of {nearest.weights_bytes / 2**30:.2f}"
        + (f"; it would fit {larger[0]}" if larger else "")
    )


def by_problem(meshes: Sequence[MeshFit]) -> list[str]:
    """Each problem once, behind the meshes that have it; alone where all do."""
    found: dict[str, list[str]] = {}
    for each in meshes:
        if each.problem:
            found.setdefault(each.problem.removeprefix(f"mesh is {each.mesh!r}: "), []).append(each.mesh)
    return [
        problem if len(names) == len(meshes) > 1 else f"{', '.join(names)}: {problem}"
        for problem, names in found.items()
    ]
