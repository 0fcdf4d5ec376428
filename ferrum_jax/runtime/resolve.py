"""Resolve: what a config leaves open, decided for a model and a device, or every reason why it cannot run there."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig, MeshShape
from ferrum_jax.models import registry
from ferrum_jax.pools.pools import layer_pool_shape
from ferrum_jax.sharding import refusals as mesh_refusals
from ferrum_jax.spec import Kept, ModelSpec, VisionSpec
from pallas_kernels.kv_pool import KV_DTYPES, TPU_HEAD_DIMS, KVPool
from pallas_kernels.paged_attention.support import LATENT_LANES, default_implementation
from pallas_kernels.paged_attention.support import refusals as kernel_refusals
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config with nothing left open but sizes. spec: fitted to max_model_len. shape: of the mesh. target: a device
    of it."""

    spec: ModelSpec
    config: EngineConfig
    mesh: Mesh
    shape: MeshShape
    target: Target
    dtype: jnp.dtype
    kv_dtype: str
    implementation: str
    max_model_len: int

    def one_block(self, local: ModelSpec, block_size: int) -> list[tuple[KVPool, int]]:
        """Of a layer of each cache group: the shapes of its pool of one block on one device, and its query heads.

        local: the spec with the heads of one device.
        """
        form = {"block_size": block_size, "kv_dtype": KV_DTYPES[self.kv_dtype], "implementation": self.implementation}
        layers = [local.attention_of(group.layers[0]) for group in local.kv_groups]
        return [(layer_pool_shape(own, num_blocks=1, **form), own.num_attention_heads) for own in layers]


def resolve(spec: ModelSpec, config: EngineConfig, mesh: Mesh) -> Resolved:
    """Raises ValueError with every reason why the engine cannot run here."""
    target = Target.of_device(mesh.devices.flat[0])
    spec = spec if config.max_image_tokens else registry.without_tower(spec)
    config = config.on(target.platform)
    dtype = resolve_dtype(config, target.platform, "float32" if spec.dtype == "float32" else "bfloat16")
    max_model_len = config.max_model_len or spec.max_position_embeddings
    resolved = Resolved(
        spec=registry.quantised_spec(spec, config.weights).fitted(max_model_len),
        config=config,
        mesh=mesh,
        shape=_shape_of(mesh, config),
        target=target,
        dtype=dtype,
        kv_dtype=dtype.name if config.kv_dtype == "auto" else config.kv_dtype,
        implementation=config.implementation or _unnamed_implementation(spec, config, target),
        max_model_len=max_model_len,
    )
    reasons = _refusals(resolved)
    if reasons:
        raise ValueError("; ".join(reasons))
    return resolved


def _shape_of(mesh: Mesh, config: EngineConfig) -> MeshShape:
    """The shape of the mesh that is there; a config that names one adds how experts are spread over it."""
    named = MeshShape() if config.mesh is None else config.mesh_shape
    return dataclasses.replace(named, **mesh.shape)


def lacks_kernels(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether "xla" alone has a model's attention, so that it is what runs where no other is named."""

    def lacks(own: Kept) -> bool:
        if own.is_latent:
            return own.head_dim % LATENT_LANES > 0 or config.kv_dtype == "int8"
        return own.head_dim != own.v_head_dim or own.head_dim > max(TPU_HEAD_DIMS)  # Hopper's end there too

    return _is_chunked(spec) or sees_images_whole(spec) or any(lacks(own) for own in _kept(spec))


def sees_images_whole(spec: ModelSpec) -> bool:
    """Whether tokens of an image attend to all of it, those behind them too."""
    return spec.vision is not None and spec.vision.sees_both_ways


def _unnamed_implementation(spec: ModelSpec, config: EngineConfig, target: Target) -> str:
    return "xla" if lacks_kernels(spec, config) else default_implementation(target)


def _is_chunked(spec: ModelSpec) -> bool:
    return any(group.chunked for group in spec.kv_groups)


def _kept(spec: ModelSpec) -> list[Kept]:
    return [spec.attention_of(group.layers[0]).kept for group in spec.kv_groups]


def resolve_dtype(config: EngineConfig, platform: str, on_accelerators: str) -> jnp.dtype:
    """The dtype that a config names, else float32 on the CPU and `on_accelerators` elsewhere."""
    automatic = "float32" if platform == "cpu" else on_accelerators
    return jnp.dtype(automatic if config.dtype == "auto" else config.dtype)


def shared_refusals(
    config: EngineConfig, platform: str, dtype: jnp.dtype, max_model_len: int, most_positions: int
) -> list[str]:
    """What engines and encoders refuse alike: lengths beyond the model's, and invariance where it does not hold."""
    reasons = []
    if max_model_len > most_positions:
        reasons.append(
            f"max_model_len is {max_model_len}, more than the model's {most_positions} positions "
            "(max_position_embeddings in its config.json, times the factor where its rope is dynamic)"
        )
    on_cpu = platform == "cpu"
    if config.invariant and not (on_cpu and dtype == jnp.float32):
        reasons.append(
            "invariant=True holds on the CPU in float32 only; "
            f"this is {'the CPU' if on_cpu else 'another platform'} in {dtype.name}"
        )
    return reasons


def _image_refusals(config: EngineConfig, vision: VisionSpec) -> list[str]:
    """Why images of one size have no room, or none in one step where their tokens see each other."""
    patches, tokens = vision.patches_of_all, vision.tokens_of_all
    if patches is None or tokens is None:
        return []
    least = tokens + config.num_rows - 1  # beside the tokens of all other rows
    found = [
        f"{name} is {value}, and an image of this model has {count} {what}; raise it to {count} or more, or set "
        "max_image_tokens=0 to serve the text alone"
        for name, value, count, what in (
            ("max_image_patches", config.max_image_patches, patches, "patches"),
            ("max_image_tokens", config.max_image_tokens, tokens, "tokens"),
        )
        if value < count
    ]
    if vision.sees_both_ways and config.max_num_batched_tokens < least:
        found.append(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, and a step must hold the {tokens} tokens of "
            f"an image, which see each other, beside those of {config.num_rows - 1} other rows; raise it to {least} or "
            "more, lower max_num_seqs, or set max_image_tokens=0 to serve the text alone"
        )
    return found


def _refusals(resolved: Resolved) -> list[str]:
    spec, config, target = resolved.spec, resolved.config, resolved.target
    kernels = [
        reason
        for own in _kept(spec)
        for reason in kernel_refusals(
            resolved.implementation,
            target=target,
            head_dim=own.head_dim,
            v_head_dim=own.v_head_dim,
            is_latent=own.is_latent,
            chunked=_is_chunked(spec),
            block_size=config.block_size,
            kv_dtype=resolved.kv_dtype,
        )
    ]
    kernels = list(dict.fromkeys(kernels))
    if config.product_implementation == "mosaic_tpu" and target.platform != "tpu":
        kernels.append(f"product_implementation is 'mosaic_tpu', and {target.platform!r} is no TPU; leave it 'xla'")
    if config.attention_tiles is not None and resolved.implementation != "mosaic_tpu":
        kernels.append(
            f"attention_tiles is {config.attention_tiles!r}; only 'mosaic_tpu' has them, and implementation is "
            f"{resolved.implementation!r}"
        )
    if spec.vision is not None and config.max_adapters:
        kernels.append(
            f"max_adapters is {config.max_adapters}, and a model that sees images takes no adapters yet; set "
            "max_image_tokens=0 to serve it for text alone"
        )
    if config.return_routed_experts and spec.experts is None:
        kernels.append("return_routed_experts is True, and this model has no experts; leave it False")
    if spec.vision is not None:
        kernels += _image_refusals(config, spec.vision)
    if sees_images_whole(spec) and resolved.implementation != "xla":
        kernels.append(
            f"implementation is {resolved.implementation!r}, and tokens of this model's images see each other, which "
            "'xla' alone computes; take it, or set max_image_tokens=0 to serve the text alone"
        )
    shared = shared_refusals(config, target.platform, resolved.dtype, resolved.max_model_len, spec.most_positions)
    return [*mesh_refusals(spec, resolved.shape), *kernels, *shared]
