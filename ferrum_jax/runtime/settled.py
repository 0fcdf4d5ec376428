"""Settled: what an engine is made from, with nothing left open; or every reason why it cannot run.

A config is what was asked for and stays as it is. What it leaves open is decided here, once, for a model and a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.inputs.sizes.speculative import asks_the_model
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import on_one_device
from ferrum_jax.models.sharding.shards import expert_shards_of, shards_of
from ferrum_jax.models.sharding.undivided import refusals as mesh_refusals
from ferrum_jax.models.spec import Kept, ModelSpec
from ferrum_jax.runtime.buckets import Ladder, choose_table_width, make_ladder, most_places
from ferrum_jax.runtime.pools.pools import layer_pool_shape
from ferrum_jax.runtime.refusals import Buckets, Limits, tower_refusals
from ferrum_jax.runtime.step_options import StepOptions
from pallas_kernels.kv_pool import KV_DTYPES, TPU_HEAD_DIMS, KVPool
from pallas_kernels.paged_attention.support import LATENT_LANES, default_implementation, has_gpu_heads, has_tpu_heads
from pallas_kernels.paged_attention.support import refusals as kernel_refusals
from pallas_kernels.target import Target

_CLIPS_AGAIN = 4  # of so many rows' clips, one more is kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Sizes by memory where a config leaves them open: rows of a data shard, and its pool in blocks or in bytes.

    why: a sentence of why the rows are fewer than by default, or "".
    """

    max_num_seqs: int | None = None
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    why: str = ""

    @classmethod
    def of(cls, config: EngineConfig) -> Room:
        """The sizes that the config names."""
        return cls(
            max_num_seqs=config.max_num_seqs, num_blocks=config.num_blocks, kv_memory_bytes=config.kv_memory_bytes
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """The settled decisions that a layout follows from. spec: fitted to max_model_len. target: a device of the mesh.

    config: as it was asked for. implementation: of attention. why_bounded: in a sentence why blocks are larger or rows
    fewer than they are by default; "" where they are not.
    """

    spec: ModelSpec
    config: EngineConfig
    mesh: Mesh
    shape: MeshShape
    target: Target
    dtype: jnp.dtype
    kv_dtype: str
    implementation: str
    limits: Limits
    room: Room
    why_bounded: str

    @functools.cached_property
    def options(self) -> StepOptions:
        """The options of all steps."""
        config = self.config
        return StepOptions(
            spec=self.spec,
            dtype=self.dtype,
            target=self.target,
            local=self.local,
            shards=shards_of(self.mesh),
            expert_shards=expert_shards_of(self.mesh, self.shape),
            block_size=self.limits.block_size,
            implementation=self.implementation,
            invariant=config.invariant,
            tiles=config.attention_tiles,
            gives_experts=config.return_routed_experts,
            gives_masks=config.return_sampling_mask,
            products="xla" if config.product_implementation == "auto" else config.product_implementation,
        )

    @functools.cached_property
    def local(self) -> ModelSpec:
        """The spec with the heads of one device."""
        return self.spec.with_attention(lambda own: on_one_device(own, self.shape.tp))

    @property
    def form_of_pools(self) -> dict[str, Any]:
        """How blocks are kept, as `layer_pool_shape` takes it."""
        return {
            "block_size": self.limits.block_size,
            "kv_dtype": KV_DTYPES[self.kv_dtype],
            "implementation": self.implementation,
        }

    @property
    def num_clips(self) -> int:
        """Clips that are kept: those of all rows, and some that may be asked for again."""
        rows = self.limits.max_num_seqs * self.shape.dp
        return rows + ceil_div(rows, _CLIPS_AGAIN)

    def one_block(self, block_size: int) -> list[tuple[KVPool, int]]:
        """For a layer of each cache group: the shapes of a one-block pool on one device, and its query heads."""
        form = {"block_size": block_size, "kv_dtype": KV_DTYPES[self.kv_dtype], "implementation": self.implementation}
        layers = [self.local.attention_of(group.layers[0]) for group in self.local.kv_groups]
        return [(layer_pool_shape(own, num_blocks=1, **form), own.num_attention_heads) for own in layers]

    @property
    def most_places(self) -> int:
        """Places of a step with drafts, whether this engine has them or not: masks have room for so many."""
        limits = self.limits
        accelerator = self.target.platform != "cpu"
        return most_places(limits.max_num_seqs, limits.max_num_batched_tokens, accelerator=accelerator)

    def ladder(self, reach: Reach | None = None, limits: Limits | None = None) -> Ladder:
        """The buckets for requests of this reach, None for any reach. limits: in place of its own."""
        limits, config = limits or self.limits, self.config
        ladder = make_ladder(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            table_width=choose_table_width(limits.max_model_len, limits.block_size, reach),
            invariant=config.invariant,
            accelerator=self.target.platform != "cpu",
            adapters=config.max_adapters > 0,
            images=self.spec.embeds_media,
            reach=reach,
        )
        return dataclasses.replace(
            ladder,
            num_places=0 if config.speculative_config is None else self.most_places,
            spreads=self.implementation == "xla" and not self.spec.state_layers,
            predicts=asks_the_model(config.speculative_config),
            has_launches=not (
                config.invariant or config.return_sampling_mask or asks_the_model(config.speculative_config)
            ),
            goes_on=not (config.return_routed_experts or config.speculative_config),
        )

    def buckets(self, reach: Reach | None) -> Buckets:
        """The buckets, to be asked whether attention fits them."""
        return Buckets(
            options=self.options,
            ladder_of=lambda limits: self.ladder(reach, limits),
            pools_of=lambda limits: self.one_block(limits.block_size),
        )


def settle(spec: ModelSpec, config: EngineConfig, mesh: Mesh, room: Room | None = None) -> Settled:
    """The decisions for a model, config and mesh. room: sizes by memory; None takes the config's.

    Blocks are larger, and only then rows fewer, where attention has no room for the default and the config leaves them
    open: whatever requests will come, because jobs share their executables. Raises ValueError with every reason why
    the engine cannot run here.
    """
    target, room = Target.of_device(mesh.devices.flat[0]), room or Room.of(config)
    spec = spec if config.max_image_tokens else registry.without_tower(spec)
    dtype = resolve_dtype(config.dtype, target.platform, "float32" if spec.dtype == "float32" else "bfloat16")
    limits = Limits(
        max_num_seqs=room.max_num_seqs or config.rows_on(target.platform),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or spec.max_position_embeddings,
        block_size=config.block_size or 0,
    )
    asked = Settled(
        spec=registry.quantised_spec(spec, config.weights).fitted(limits.max_model_len),
        config=config,
        mesh=mesh,
        shape=_shape_of(mesh, config),
        target=target,
        dtype=dtype,
        kv_dtype=dtype.name if config.kv_dtype == "auto" else config.kv_dtype,
        implementation=config.implementation
        or ("xla" if lacks_kernels(spec, config.kv_dtype, target.platform) else default_implementation(target)),
        limits=limits,
        room=room,
        why_bounded="",
    )
    if reasons := _refusals(asked):
        raise ValueError("; ".join(reasons))
    return _bounded(asked)


def _bounded(asked: Settled) -> Settled:
    """With blocks and rows that attention has room for."""
    config, room, limits = asked.config, asked.room, asked.limits
    if config.block_size is None:
        token = asked.one_block(1)[0][0]
        size = asked.target.block_size(token.values.size * token.dtype.itemsize)
        limits = dataclasses.replace(limits, block_size=size)
    limits, why = (
        dataclasses.replace(asked, limits=limits)
        .buckets(None)
        .choose(limits, leaves_blocks=config.block_size is None, leaves_rows=room.max_num_seqs is None)
    )
    return dataclasses.replace(asked, limits=limits, why_bounded="; ".join(filter(None, (room.why, why))))


def _shape_of(mesh: Mesh, config: EngineConfig) -> MeshShape:
    """The shape of the mesh that is there; a config that names one adds how experts are spread over it."""
    named = MeshShape() if config.mesh is None else config.mesh_shape
    return dataclasses.replace(named, **mesh.shape)


def lacks_kernels(spec: ModelSpec, kv_dtype: str, platform: str) -> bool:
    """Whether "xla" alone has a model's attention on a platform, so that it is what runs where no other is named."""

    def lacks(own: Kept) -> bool:
        if own.is_latent:
            return own.head_dim % LATENT_LANES > 0 or kv_dtype == "int8"
        if platform == "gpu":
            return not has_gpu_heads(own.head_dim, own.v_head_dim)
        if own.head_dim != own.v_head_dim:
            return not has_tpu_heads(own.head_dim, own.v_head_dim)
        return own.head_dim > max(TPU_HEAD_DIMS)

    return any(lacks(own) for own in _kept(spec))


def _kept(spec: ModelSpec) -> list[Kept]:
    return [spec.attention_of(group.layers[0]).kept for group in spec.kv_groups]


def resolve_dtype(named: str, platform: str, on_accelerators: str) -> jnp.dtype:
    """The dtype that a config names, for "auto" float32 on the CPU and `on_accelerators` elsewhere."""
    automatic = "float32" if platform == "cpu" else on_accelerators
    return jnp.dtype(automatic if named == "auto" else named)


def shared_refusals(
    *, invariant: bool, platform: str, dtype: jnp.dtype, max_model_len: int, most_positions: int
) -> list[str]:
    """Refusals that engines and encoders share: lengths beyond the model's, and invariance where it cannot hold."""
    reasons = []
    if max_model_len > most_positions:
        reasons.append(
            f"max_model_len is {max_model_len}, more than the model's {most_positions} positions "
            "(max_position_embeddings in its config.json, times the factor where its rope is dynamic)"
        )
    on_cpu = platform == "cpu"
    if invariant and not (on_cpu and dtype == jnp.float32):
        reasons.append(
            "invariant=True holds on the CPU in float32 only; "
            f"this is {'the CPU' if on_cpu else 'another platform'} in {dtype.name}"
        )
    return reasons


def _product_refusals(named: str, target: Target) -> list[str]:
    """Why the kernels that are named for products cannot run on a target."""
    is_hopper = target.platform == "gpu" and target.num_cores is not None
    runs = {"mosaic_tpu": target.platform == "tpu", "mosaic_gpu": is_hopper}.get(named, True)
    kind = "TPU" if named == "mosaic_tpu" else "Hopper GPU"
    reason = f"product_implementation is {named!r}, and {target.generation!r} is no {kind}; leave it 'xla'"
    return [] if runs else [reason]


def _refusals(asked: Settled) -> list[str]:
    spec, config, target = asked.spec, asked.config, asked.target
    kernels = [
        reason
        for own in _kept(spec)
        for reason in kernel_refusals(
            asked.implementation,
            target=target,
            head_dim=own.head_dim,
            v_head_dim=own.v_head_dim,
            is_latent=own.is_latent,
            block_size=config.block_size,
            kv_dtype=asked.kv_dtype,
        )
    ]
    if spec.top_ks and asked.implementation == "mosaic_gpu" and not all(own.is_latent for own in _kept(spec)):
        kernels.append(
            "attention has an indexer and no latents, which 'mosaic_gpu' does not run; take implementation 'xla'"
        )
    kept = [own for own in _kept(spec) if not own.is_latent and own.head_dim not in (64, 128, 256)]
    if spec.top_ks and asked.implementation == "mosaic_tpu" and kept:
        kernels.append(
            f"attention has an indexer, and heads of {kept[0].head_dim} values are padded for 'mosaic_tpu', which steps"
            " on XLA cannot read; take implementation 'xla'"
        )
    kernels = [*dict.fromkeys(kernels), *_product_refusals(config.product_implementation, target)]
    if config.attention_tiles is not None and asked.implementation != "mosaic_tpu":
        kernels.append(
            f"attention_tiles is {config.attention_tiles!r}; only 'mosaic_tpu' has them, and implementation is "
            f"{asked.implementation!r}"
        )
    kernels += tower_refusals(
        spec,
        config,
        kv_dtype=asked.kv_dtype,
        num_rows=asked.limits.max_num_seqs,
    )
    if asks_the_model(config.speculative_config) and not spec.num_mtp_layers:
        kernels.append(
            "speculative_config's method is 'mtp', and this model has no layer that predicts one token more; choose "
            "another method"
        )
    if config.return_routed_experts and spec.experts is None:
        kernels.append("return_routed_experts is True, and this model has no experts; leave it False")
    shared = shared_refusals(
        invariant=config.invariant,
        platform=target.platform,
        dtype=asked.dtype,
        max_model_len=asked.limits.max_model_len,
        most_positions=spec.most_positions,
    )
    return [*mesh_refusals(spec, asked.shape), *kernels, *shared]
