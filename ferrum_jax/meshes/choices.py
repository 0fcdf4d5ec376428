"""Meshes of some devices: which a model fits, and how fast it is there at most, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.embeddings.encoder_runtime import lay_out_encoder
from ferrum_jax.meshes.encoder_forecast import EncoderForecast, forecast_encoder, target_of
from ferrum_jax.meshes.forecast import Forecast, forecast
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.pools.budget import RESERVED_BYTES
from ferrum_jax.runtime.fit import TooSmall, expected_temporaries, fit, refuse_overfull
from ferrum_jax.sharding import make_mesh, takes_all_hosts
from ferrum_jax.spec import ModelSpec


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
class Subject:
    """A model and a config whose mesh is open. max_seq_length: of an encoder's checkpoint, None where it has no limit
    of its own."""

    spec: ModelSpec | EncoderSpec
    config: EngineConfig
    max_seq_length: int | None = None

    def with_mesh(self, mesh: MeshShape) -> Subject:
        return dataclasses.replace(self, config=dataclasses.replace(self.config, mesh=str(mesh)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFit:
    """What becomes of a model on a mesh: what a device holds and the bounds of speed, or why it cannot run.

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
    forecast: Forecast | EncoderForecast | None = None
    problem: str = ""
    missing_bytes: int = 0
    why_bounded: str = ""

    @property
    def rate(self) -> float:
        """Output tokens a second, or of an encoder texts, at most; what meshes are ranked by."""
        found = self.forecast
        if found is None:
            return -1.0
        return found.output_tokens_per_s if isinstance(found, Forecast) else found.texts_per_s


def meshes_of(subject: Subject, devices: Sequence[Any], lengths: Lengths) -> list[MeshFit]:
    """What becomes of each of `shapes_of` that leaves no host idle; none on the CPU, whose devices share one memory."""
    if devices[0].platform == "cpu":
        return []
    shapes = [shape for shape in shapes_of(subject.spec, len(devices)) if leaves_none_idle(shape, devices)]
    return [on_mesh(subject, shape, devices, lengths) for shape in shapes]


def leaves_none_idle(shape: MeshShape, devices: Sequence[Any]) -> bool:
    """Whether every host has a device of the mesh, and every process."""
    first = {device.process_index for device in devices[: shape.size]}
    return takes_all_hosts(shape, devices) and first == {device.process_index for device in devices}


def shapes_of(spec: ModelSpec | EncoderSpec, num_devices: int) -> list[MeshShape]:
    """Each number of devices along tp that divides all; then as many data shards of them as make all.

    Where a model has experts, these shards are there with experts over all devices, and with all experts in each.
    """
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    has_experts = isinstance(spec, ModelSpec) and spec.experts is not None
    once = [MeshShape(dp=num_devices // tp, tp=tp) for tp in sizes[:-1]]
    in_each = [dataclasses.replace(shape, has_experts_once=False) for shape in once] if has_experts else []
    return [*(MeshShape(tp=tp) for tp in sizes), *once, *in_each]


def on_mesh(subject: Subject, shape: MeshShape, devices: Sequence[Any], lengths: Lengths) -> MeshFit:
    """What becomes of it on a mesh of this shape, of the first devices."""
    subject, mesh, named = subject.with_mesh(shape), make_mesh(shape, devices), str(shape)
    try:
        return (
            _encodes(subject, mesh, lengths)
            if isinstance(subject.spec, EncoderSpec)
            else _generates(subject, mesh, lengths)
        )
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


def _generates(subject: Subject, mesh: Mesh, lengths: Lengths) -> MeshFit:
    assert isinstance(subject.spec, ModelSpec)
    layout = fit(subject.spec, subject.config, mesh, temporaries_of=expected_temporaries)
    refuse_overfull(layout)
    tokens_in, tokens_out = lengths.within(layout.max_model_len)
    ledger, target = layout.ledger, layout.options.target
    return MeshFit(
        mesh=str(subject.config.mesh),
        weights_bytes=ledger.weights_bytes,
        kv_bytes=ledger.kv_bytes,
        other_bytes=ledger.used_bytes - ledger.weights_bytes - ledger.kv_bytes,
        memory_bytes=target.memory_bytes - RESERVED_BYTES,
        kv_tokens=ledger.kv_tokens,
        forecast=forecast(layout, target, tokens_in=tokens_in, tokens_out=tokens_out),
        why_bounded=layout.why_bounded,
    )


def _encodes(subject: Subject, mesh: Mesh, lengths: Lengths) -> MeshFit:
    assert isinstance(subject.spec, EncoderSpec)
    layout = lay_out_encoder(subject.spec, subject.config, mesh, subject.max_seq_length)
    tokens_in = layout.max_model_len if lengths.tokens_in is None else lengths.tokens_in
    target = target_of(layout)
    return MeshFit(
        mesh=str(subject.config.mesh),
        weights_bytes=layout.model.weights_bytes,
        memory_bytes=target.memory_bytes - RESERVED_BYTES,
        forecast=forecast_encoder(layout, target, tokens_in=tokens_in),
    )
