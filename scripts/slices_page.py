"""Writes the tables of docs/slices.md: where published models run with defaults, on which mesh, and how fast at most.

    python -m scripts.slices_page [--check] [MODEL ...]

All of it follows from published configs and shapes; no device, compiler or weight is needed, and a few minutes. With
models named, as the tables name them, only their rows are made: those of other models stand as they are. Each row is
told on stderr as it is made. The devices are described by the table below as `runtime/compile/topology.py` has them of
the compilers. --check writes nothing and fails where a table differs.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import ENCODERS, FAMILIES, encoder_spec_of, spec_of
from ferrum_jax.planning.meshes.choices import MeshFit, leaves_none_idle, on_mesh, shapes_of
from ferrum_jax.planning.meshes.forecast import Lengths
from ferrum_jax.planning.meshes.on_paper import Subject
from ferrum_jax.planning.meshes.settle import best_of, none_fits
from ferrum_jax.runtime.compile.topology import slice_of
from scripts import csv_tables
from scripts.published import PUBLISHED, PUBLISHED_ENCODERS

_TPU_KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "TPU7x": "TPU7x"}
_GPU_KINDS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
TARGETS = (  # what is rented, by the names that `--target` takes
    *("v5e-1", "v5e-4", "v5e-8", "v5e-16"),
    *("v6e-1", "v6e-4", "v6e-8", "v6e-16", "v6e-32", "v6e-64"),
    *("v5p-8", "v5p-16", "v5p-32", "v5p-64"),
    *("tpu7x-2", "tpu7x-8", "tpu7x-16", "tpu7x-32"),
    *("h100", "h100:2", "h100:8", "h200", "h200:2", "h200:8"),
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A device that is not here, as far as a layout asks."""

    platform: str
    device_kind: str
    id: int
    process_index: int = 0
    coords: tuple[int, ...] = (0, 0, 0)
    core_on_chip: int = 0

    def memory_stats(self) -> None:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: it is not here")


def main() -> None:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    parser.add_argument("models", nargs="*", metavar="MODEL", help="whose rows are made (default: all)")
    args = parser.parse_args()  # before minutes of work
    if unknown := set(args.models) - PUBLISHED.keys() - PUBLISHED_ENCODERS.keys():
        parser.error(f"no published config is called {', '.join(sorted(unknown))}")
    csv_tables.write(tables(args.models, told=True), "slices_page", check=args.check)


def tables(again: Sequence[str] = (), *, told: bool = False) -> dict[str, list[list[str]]]:
    """The tables by name. again: models whose rows are made, other rows being kept as they are; empty for all.

    told: whether each row that is made is named on stderr.
    """
    made: dict[str, list[list[str]]] = {}
    for name, names in (("slices", models()), ("encoder_slices", [*PUBLISHED_ENCODERS])):
        kept = {row[0]: row for row in csv_tables.read(name) if row[0] not in again} if again else {}
        made[name] = [["model", *TARGETS], *(kept.get(model) or row(model, told=told) for model in names)]
    return made


def row(model: str, *, told: bool) -> list[str]:
    """A model's row of its table. told: whether stderr names it."""
    if told:
        print(model, file=sys.stderr)
    return [model, *(cell(model, target) for target in TARGETS)]


def cell(model: str, target: str) -> str:
    """The mesh that is taken and its bound of speed; a dash where none fits."""
    best = best_of(meshes(model, target))
    return "–" if best.problem else f"{best.mesh} {_rate(best.rate)}"


def refusal(model: str, target: str) -> str:
    """Why a model does not run on a target, in a sentence; empty where it does."""
    found = meshes(model, target)
    return none_fits(subject(model), found, len(devices(target))) if best_of(found).problem else ""


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate < 100_000 else f"{rate / 1000:,.0f}k"


def models() -> list[str]:
    """The published models that generate, by architecture and number of parameters."""
    place = {architecture: number for number, architecture in enumerate(FAMILIES)}
    return sorted(PUBLISHED, key=lambda name: (place[PUBLISHED[name][0]["architectures"][0]], PUBLISHED[name][1]))


def smallest_of_families() -> Iterator[str]:
    """The smallest published model of each architecture, encoders too."""
    everything = PUBLISHED | PUBLISHED_ENCODERS
    for architecture in (*FAMILIES, *ENCODERS):
        sizes = [
            (config[1], name) for name, config in everything.items() if config[0]["architectures"] == [architecture]
        ]
        if sizes:
            yield min(sizes)[1]


@functools.cache
def subject(model: str) -> Subject:
    """A published model with the default config."""
    if model in PUBLISHED_ENCODERS:
        return Subject(spec=encoder_spec_of(PUBLISHED_ENCODERS[model][0]), config=EngineConfig())
    return Subject(spec=spec_of(PUBLISHED[model][0]), config=EngineConfig())


def meshes(model: str, target: str) -> list[MeshFit]:
    """What becomes of a model on each mesh of a target."""
    there = devices(target)
    return [
        _on_mesh(model, target, shape)
        for shape in shapes_of(subject(model).spec, len(there))
        if leaves_none_idle(shape, there)
    ]


def _on_mesh(model: str, target: str, shape: MeshShape) -> MeshFit:
    there = devices(target)
    return _on_devices(subject(model).spec.digest_text(), model, there[0].device_kind, shape, there)


@functools.cache
def _known() -> dict[tuple[str, str, MeshShape], MeshFit]:
    """What was found, by model, kind of device and shape: larger slices have the same meshes, and models equals."""
    return {}


def _on_devices(spec: str, model: str, kind: str, shape: MeshShape, there: Sequence[Any]) -> MeshFit:
    known = _known()
    if (spec, kind, shape) not in known:
        known[spec, kind, shape] = on_mesh(subject(model), shape, there, Lengths())
    return known[spec, kind, shape]


@functools.cache
def devices(target: str) -> tuple[Described, ...]:
    """The devices of a target, one of TARGETS."""
    kind, _, count = target.partition(":")
    if kind in _GPU_KINDS:
        return tuple(Described("gpu", _GPU_KINDS[kind], id=number) for number in range(int(count or 1)))
    topology, host = slice_of(target)
    generation, _, shape = topology.partition(":")
    places = list(itertools.product(*(range(int(size)) for size in reversed(shape.split("x")))))
    cores = 2 if generation == "TPU7x" else 1
    of_host = 8 if host is not None else 4
    chips = [tuple(reversed((0,) * (3 - len(place)) + place)) for place in places]
    return tuple(
        Described("tpu", _TPU_KINDS[generation], chip * cores + core, chip // of_host, coords, core)
        for chip, coords in enumerate(chips)
        for core in range(cores)
    )


if __name__ == "__main__":
    main()
