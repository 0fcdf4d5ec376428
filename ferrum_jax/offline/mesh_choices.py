"""Meshes: which of a target's devices' meshes a model fits, and how fast it is there at most, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ferrum_jax.config import MeshShape
from ferrum_jax.executables.topology import target_devices
from ferrum_jax.offline.bundle_order import BundleOrder
from ferrum_jax.offline.encoder_forecast import EncoderForecast, forecast_encoder, target_of
from ferrum_jax.offline.forecast import Forecast, forecast
from ferrum_jax.runtime.fit import TooSmall, expected_temporaries, fit, refuse_overfull
from ferrum_jax.sharding import make_mesh, takes_all_hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of a request in and out; None takes what the model has room for: 1,024 and 256 where it can.

    Raises ValueError for a number below 1.
    """

    tokens_in: int | None = None
    tokens_out: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens_in", "tokens_out"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ValueError(f"{name} is {tokens}; it must be 1 or more")

    def within(self, max_model_len: int) -> tuple[int, int]:
        """Both as numbers. Only what was left open is made to fit."""
        out = min(256, max_model_len // 5) if self.tokens_out is None else self.tokens_out
        room = max(max_model_len - out, 1)
        return (min(1024, room) if self.tokens_in is None else self.tokens_in), out


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFit:
    """problem: why the model cannot run on a mesh; empty where it can, with what a device holds and the bounds."""

    mesh: str
    weights_bytes: int | None = None
    kv_tokens: int = 0
    forecast: Forecast | EncoderForecast | None = None
    problem: str = ""


def meshes_of(order: BundleOrder, lengths: Lengths) -> list[MeshFit]:
    """What becomes of each of `shapes_of`; none on the CPU, whose devices share one memory."""
    devices = target_devices(order.target)
    if devices[0].platform == "cpu":
        return []
    shapes = [shape for shape in shapes_of(len(devices)) if takes_all_hosts(shape, devices)]
    return [_on_mesh(order, shape, lengths, devices) for shape in shapes]


def shapes_of(num_devices: int) -> list[MeshShape]:
    """Each number of devices along tp that divides all; then as many data shards of them as make all."""
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    return [MeshShape(tp=tp) for tp in sizes] + [MeshShape(dp=num_devices // tp, tp=tp) for tp in sizes[:-1]]


def _on_mesh(order: BundleOrder, shape: MeshShape, lengths: Lengths, devices: Sequence[Any]) -> MeshFit:
    mesh = make_mesh(shape, devices)
    order = dataclasses.replace(order, config=dataclasses.replace(order.config, mesh=str(shape)))
    try:
        return _encodes(order, lengths) if order.is_encoder else _generates(order, mesh, lengths)
    except TooSmall as small:
        return MeshFit(mesh=str(shape), weights_bytes=small.weights_bytes, problem=small.what.partition(":")[0])
    except ValueError as error:
        return MeshFit(mesh=str(shape), problem=str(error))


def _generates(order: BundleOrder, mesh: Mesh, lengths: Lengths) -> MeshFit:
    layout = fit(order.spec, order.config, mesh, temporaries_of=expected_temporaries)
    refuse_overfull(layout)
    tokens_in, tokens_out = lengths.within(layout.max_model_len)
    return MeshFit(
        mesh=order.config.mesh,
        weights_bytes=layout.ledger.weights_bytes,
        kv_tokens=layout.ledger.kv_tokens,
        forecast=forecast(layout, layout.options.target, tokens_in=tokens_in, tokens_out=tokens_out),
    )


def _encodes(order: BundleOrder, lengths: Lengths) -> MeshFit:
    layout = order.lay_out_encoder()
    tokens_in = layout.max_model_len if lengths.tokens_in is None else lengths.tokens_in
    return MeshFit(
        mesh=order.config.mesh,
        weights_bytes=layout.model.weights_bytes,
        forecast=forecast_encoder(layout, target_of(layout), tokens_in=tokens_in),
    )
