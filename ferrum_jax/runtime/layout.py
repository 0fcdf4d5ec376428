"""Layout: everything that follows from spec, config and device, before a weight is read or a step compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax import sampling
from ferrum_jax.cache.budget import GroupBlocks, Ledger, choose_num_blocks, choose_num_host_blocks, free_bytes
from ferrum_jax.cache.host_blocks import host_block_bytes
from ferrum_jax.cache.pools import Pools, block_bytes, kv_shapes, pools_on_mesh, with_states
from ferrum_jax.config import EngineConfig, MeshShape, Reach
from ferrum_jax.models import registry
from ferrum_jax.runtime.buckets import Ladder, choose_table_width, make_ladder
from ferrum_jax.runtime.processes import smallest
from ferrum_jax.runtime.refusals import Limits, refuse_buckets
from ferrum_jax.runtime.step import StepOptions
from ferrum_jax.sharding import DATA, ShardedModel, expert_shards_of, local_bytes, shard_model, shards_of
from ferrum_jax.sharding import refusals as mesh_refusals
from ferrum_jax.spec import ModelSpec
from ferrum_jax.windows import pool_blocks
from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.paged_attention.support import default_implementation
from pallas_kernels.paged_attention.support import refusals as kernel_refusals
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """All that follows from spec, config and device, before any weight is read."""

    dtype: jnp.dtype
    kv_dtype: str
    max_model_len: int
    graph: nnx.GraphDef
    mesh: Mesh
    model: ShardedModel
    pools: Pools  # of ShapeDtypeStructs
    ladder: Ladder
    options: StepOptions
    ledger: Ledger

    @property
    def targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Weights by dotted name, in the order of the executables' argument."""
        return self.model.targets

    @property
    def num_prompts(self) -> int:
        """Slots of cached prompts in a data shard, the null one included."""
        return self.pools.prompts.shape[0] // self.ledger.num_shards

    @property
    def num_rows(self) -> int:
        """Rows that all data shards run at once."""
        return self.pools.slots.shape[0] - self.ledger.num_shards

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request for which block tables are wide enough."""
        return min(self.max_model_len, self.ladder.buckets[-1].table_width * self.options.block_size)


def lay_out(spec: ModelSpec, config: EngineConfig, mesh: Mesh, reach: Reach | None = None) -> Layout:
    """The layout of an engine on a mesh. Raises ValueError with every reason why it cannot run here.

    reach: of the requests that will come, where they are known; it makes the ladder shorter, pools stay as they are.
    """
    target = Target.of_device(mesh.devices.flat[0])
    auto_dtype = "float32" if target.platform == "cpu" or spec.dtype == "float32" else "bfloat16"  # never float16
    dtype = jnp.dtype(auto_dtype if config.dtype == "auto" else config.dtype)
    kv_dtype = dtype.name if config.kv_dtype == "auto" else config.kv_dtype
    implementation = config.implementation or default_implementation(target)
    max_model_len = config.max_model_len or spec.max_position_embeddings
    spec = spec.fitted(max_model_len)
    shape = MeshShape(**mesh.shape, has_experts_once=MeshShape.parse(config.mesh).has_experts_once)
    _refuse(spec, config, dtype, kv_dtype, implementation, max_model_len, target, shape)
    graph, parameters = registry.unbind(registry.abstract_model(spec, dtype))
    model = shard_model(spec, parameters, mesh, shape)
    local = dataclasses.replace(spec, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads)
    block_size = config.block_size or _block_size(local, kv_dtype, implementation, target)
    form = {"block_size": block_size, "kv_dtype": KV_DTYPES[kv_dtype], "implementation": implementation}
    groups = _count_blocks(
        spec, config, block_bytes(local, target=target, **form), mesh, max_model_len, block_size, model.weights_bytes
    )
    kv = kv_shapes(local, num_blocks=[group.num_blocks + 1 for group in groups], **form)
    pools, ledger = _shape_pools(spec, config, mesh, kv, dtype, max_model_len, model, groups, block_size)
    options = StepOptions(
        spec=spec,
        dtype=dtype,
        target=target,
        num_heads=model.heads,
        shards=shards_of(mesh),
        expert_shards=expert_shards_of(mesh, shape),
        block_size=block_size,
        implementation=implementation,
        invariant=config.invariant,
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
    )

    def ladder_of(limits: Limits) -> Ladder:
        return make_ladder(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            table_width=choose_table_width(limits.max_model_len, limits.block_size, reach),
            invariant=config.invariant,
            accelerator=target.platform != "cpu",
            reach=reach,
        )

    refuse_buckets(limits, options, ladder_of, lambda o: _one_block(local, o.block_size, kv_dtype, implementation))
    return Layout(
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_model_len=max_model_len,
        graph=graph,
        mesh=mesh,
        model=model,
        pools=pools,
        ladder=ladder_of(limits),
        options=options,
        ledger=ledger,
    )


def _count_blocks(
    spec: ModelSpec,
    config: EngineConfig,
    bytes_by_group: Sequence[int],
    mesh: Mesh,
    max_model_len: int,
    block_size: int,
    weights_bytes: int,
) -> tuple[GroupBlocks, ...]:
    """The blocks of each cache group, as asked or as many as fit. bytes_by_group: of one block on one device."""

    def groups(num_blocks: int) -> tuple[GroupBlocks, ...]:
        counts = [
            pool_blocks(
                group.window,
                num_blocks,
                block_size=block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                keeps_cache=config.enable_prefix_caching,
            )
            for group in spec.kv_groups
        ]
        return tuple(GroupBlocks(num_blocks=n, block_bytes=b) for n, b in zip(counts, bytes_by_group, strict=True))

    return groups(
        choose_num_blocks(
            num_blocks=config.num_blocks,
            kv_memory_bytes=_kv_memory_bytes(config, mesh, weights_bytes),
            kv_bytes=lambda n: sum((group.num_blocks + 1) * group.block_bytes for group in groups(n)),
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
    )


def _shape_pools(
    spec: ModelSpec,
    config: EngineConfig,
    mesh: Mesh,
    kv: Mapping[int, KVPool],
    dtype: jnp.dtype,
    max_model_len: int,
    model: ShardedModel,
    groups: tuple[GroupBlocks, ...],
    block_size: int,
) -> tuple[Pools, Ledger]:
    """All pools of the mesh, and what they take of one device. kv: its pools of blocks by layer."""
    num_prompts = 1 + (config.max_cached_prompts if config.enable_prefix_caching else 0)
    num_states = 1 + config.max_num_seqs + (config.max_state_snapshots if config.enable_prefix_caching else 0)
    record_words = sampling.RECORD_WORDS + max_model_len
    local = Pools(
        kv=tuple(kv[layer] for layer in sorted(kv)),
        slots=jax.ShapeDtypeStruct((config.max_num_seqs + 1, record_words), jnp.int32),
        prompts=jax.ShapeDtypeStruct((num_prompts, spec.hidden_size), dtype),
    )
    of_blocks = pools_on_mesh(local, mesh)
    block_bytes = host_block_bytes(of_blocks.kv)
    pools = with_states(of_blocks, spec, registry.state_arrays(spec, dtype), num_states, mesh)
    states = jax.tree.leaves([pools.kv[layer] for layer in spec.state_layers])
    ledger = Ledger(
        weights_bytes=model.weights_bytes,
        slots_bytes=local.slots.size * 4,
        prompts_bytes=local.prompts.size * dtype.itemsize,
        state_bytes=sum(map(local_bytes, states)) // num_states,
        num_states=num_states if spec.state_layers else 0,
        groups=groups,
        block_size=block_size,
        num_shards=mesh.shape[DATA],
        head_copies=model.head_copies,
        host_block_bytes=block_bytes,
        num_host_blocks=choose_num_host_blocks(
            host_cache_bytes=config.host_cache_bytes if config.enable_prefix_caching else 0,
            block_bytes=block_bytes,
            block_size=block_size,
            num_shards=mesh.shape[DATA],
        ),
    )
    return pools, ledger


def _kv_memory_bytes(config: EngineConfig, mesh: Mesh, weights_bytes: int) -> int:
    if config.kv_memory_bytes is not None or config.num_blocks is not None:
        return config.kv_memory_bytes or 0  # the number of blocks counts, and devices that are not here tell no memory
    return smallest(free_bytes(mesh.devices.flatten().tolist(), weights_bytes))


def _block_size(spec: ModelSpec, kv_dtype: str, implementation: str, target: Target) -> int:
    """Tokens of a block where the user names no number; spec: with the heads of one device."""
    token = _one_block(spec, 1, kv_dtype, implementation)
    return target.block_size(token.values.size * token.dtype.itemsize)


def _one_block(spec: ModelSpec, block_size: int, kv_dtype: str, implementation: str) -> KVPool:
    """The shapes of a layer's pool of one block on one device; spec: with the heads of that."""
    return pool_shape(
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        dtype=KV_DTYPES[kv_dtype],
        implementation=implementation,
    )


def _refuse(
    spec: ModelSpec,
    config: EngineConfig,
    dtype: jnp.dtype,
    kv_dtype: str,
    implementation: str,
    max_model_len: int,
    target: Target,
    shape: MeshShape,
) -> None:
    """Raises ValueError with every reason why this cannot run here."""
    reasons = mesh_refusals(spec, shape) + kernel_refusals(
        implementation, target=target, head_dim=spec.head_dim, block_size=config.block_size, kv_dtype=kv_dtype
    )
    if max_model_len > spec.max_position_embeddings:
        reasons.append(
            f"max_model_len is {max_model_len}, more than the model's max_position_embeddings, "
            f"{spec.max_position_embeddings}"
        )
    on_cpu = target.platform == "cpu"
    if config.invariant and not (on_cpu and dtype == jnp.float32):
        reasons.append(
            "invariant=True holds on the CPU in float32 only; "
            f"this is {'the CPU' if on_cpu else 'another platform'} in {dtype.name}"
        )
    if reasons:
        raise ValueError("; ".join(reasons))
