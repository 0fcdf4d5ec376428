"""Meshes: which of a target's devices' meshes a model fits, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ferrum_jax.bundling import BundleOrder
from ferrum_jax.config import MeshShape
from ferrum_jax.runtime.fit import PROBE_BLOCKS, available_bytes, kv_bytes_left
from ferrum_jax.runtime.layout import Layout, lay_out
from ferrum_jax.runtime.topology import target_devices
from ferrum_jax.sharding import make_mesh, takes_all_hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFit:
    """problem: why the model cannot run on it; empty where it can, with the tokens that its KV pool then holds."""

    mesh: str
    weights_bytes: int | None = None
    kv_tokens: int = 0
    problem: str = ""


def meshes_of(order: BundleOrder, layout: Layout) -> list[MeshFit]:
    """What becomes of each of `shapes_of`; none on the CPU, whose devices share one memory.

    layout: of one mesh, whose step's needs stand for those of all.
    """
    devices = target_devices(order.target)
    if devices[0].platform == "cpu":
        return []
    shapes = [shape for shape in shapes_of(len(devices)) if takes_all_hosts(shape, devices)]
    return [_fit(order, shape, devices[: shape.size], layout.ledger.temporaries_bytes) for shape in shapes]


def shapes_of(num_devices: int) -> list[MeshShape]:
    """Each number of devices along tp that divides all; then as many data shards of them as make all."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return [MeshShape(tp=tp) for tp in sizes] + [MeshShape(dp=num_devices // tp, tp=tp) for tp in sizes[:-1]]


def _fit(order: BundleOrder, shape: MeshShape, devices: Sequence[Any], temporaries: int) -> MeshFit:
    config = dataclasses.replace(order.config, mesh=str(shape), num_blocks=PROBE_BLOCKS)
    mesh = make_mesh(shape, devices)
    try:
        probe = lay_out(order.spec, config, mesh)
    except ValueError as error:
        return MeshFit(mesh=str(shape), problem=str(error))
    weights = probe.ledger.weights_bytes
    try:
        left = kv_bytes_left(probe, available_bytes(devices[0]), temporaries)
    except ValueError as error:
        return MeshFit(mesh=str(shape), weights_bytes=weights, problem=str(error).partition(":")[0])
    full = lay_out(order.spec, dataclasses.replace(config, num_blocks=None, kv_memory_bytes=left), mesh)
    return MeshFit(mesh=str(shape), weights_bytes=weights, kv_tokens=full.ledger.kv_tokens)
