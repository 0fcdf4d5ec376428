"""Layout: everything that follows from spec, config and device, before a weight is read or a step compiled.

    resolve ─► shard ─► bound ─► size ─► ladder

Each step returns a value, and the next ones read it: what a config left open (`resolve.py`), the model as it lies on
the mesh, blocks and rows that its attention has room for, the pools with what they take of a device, the buckets.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax import sampling
from ferrum_jax.adapters.adapter_slots import AdapterSlots, adapter_slots
from ferrum_jax.config import EngineConfig, Reach
from ferrum_jax.ints import ceil_div, pool_blocks
from ferrum_jax.layers.formed_weight import give_kernels
from ferrum_jax.models import registry
from ferrum_jax.models.encoder_spec import EncoderSpec
from ferrum_jax.pools.budget import GroupBlocks, Ledger, choose_num_blocks, choose_num_host_blocks, cpu_pool_bytes
from ferrum_jax.pools.host_blocks import host_block_bytes
from ferrum_jax.pools.pools import Pools, block_bytes, kv_shapes, pools_on_mesh, with_states
from ferrum_jax.processes.processes import smallest
from ferrum_jax.runtime.buckets import Ladder, choose_table_width, make_ladder
from ferrum_jax.runtime.refusals import Buckets, Limits
from ferrum_jax.runtime.resolve import Resolved, resolve
from ferrum_jax.runtime.sample import Head
from ferrum_jax.runtime.step import StepOptions
from ferrum_jax.sharding import (
    DATA,
    ShardedModel,
    expert_shards_of,
    head_copies,
    local_bytes,
    on_one_device,
    shard_model,
    shards_of,
)
from ferrum_jax.spec import ModelSpec
from ferrum_jax.towers.image_slots import ImageSlots, image_slots
from pallas_kernels.kv_pool import KV_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """A model on a mesh, whether it generates or encodes."""

    spec: ModelSpec | EncoderSpec
    dtype: jnp.dtype
    max_model_len: int
    graph: nnx.GraphDef
    mesh: Mesh
    model: ShardedModel

    @property
    def targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Weights by dotted name, in the order of the executables' argument."""
        return self.model.targets

    @property
    def num_shards(self) -> int:
        """Data shards: each has rows of its own."""
        return self.mesh.shape[DATA]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout(ModelLayout):
    """All that follows from spec, config and device, before any weight is read.

    refused_products: weights in a form that 'mosaic_tpu' does not multiply, with the reasons; XLA does.
    why_bounded: in a sentence why blocks are larger or rows fewer than they are by default; "" where they are not.
    """

    spec: ModelSpec
    kv_dtype: str
    pools: Pools  # of ShapeDtypeStructs
    ladder: Ladder
    options: StepOptions
    ledger: Ledger
    adapters: AdapterSlots | None = None
    images: ImageSlots | None = None
    refused_products: dict[str, str] = dataclasses.field(default_factory=dict)
    why_bounded: str = ""

    @functools.cached_property
    def head(self) -> Head:
        """What makes logits."""
        return Head.of(self.graph, self.decoder_targets, self.pools.hidden, self.options, self.adapters)

    @functools.cached_property
    def decoder_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The weights that a forward takes: all but a tower's."""
        return {name: target for name, target in self.targets.items() if not registry.of_tower(name)}

    @property
    def num_prompts(self) -> int:
        """Slots of cached prompts in a data shard, the null one included."""
        return self.pools.prompts.shape[0] // self.num_shards

    @property
    def num_rows(self) -> int:
        """Rows that all data shards run at once."""
        return self.pools.slots.shape[0] - self.num_shards

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request for which block tables are wide enough."""
        return min(self.max_model_len, self.ladder.buckets[-1].table_width * self.options.block_size)

    def settled(self, config: EngineConfig) -> EngineConfig:
        """The config that this is the layout of, with the rows that were chosen where it leaves them open."""
        return config.with_rows(self.num_rows // self.num_shards)


def lay_out(spec: ModelSpec, config: EngineConfig, mesh: Mesh, reach: Reach | None = None) -> Layout:
    """The layout of an engine on a mesh. Raises ValueError with every reason why it cannot run here.

    reach: of the requests that will come, where they are known; it makes the ladder shorter, pools stay as they are.
    """
    resolved = resolve(spec, config, mesh)
    sharded = _shard(resolved)
    resolved, sharded, why = _bound(config, resolved, sharded)
    sized = _size(resolved, sharded)
    return Layout(
        spec=resolved.spec,
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        max_model_len=resolved.max_model_len,
        graph=sharded.graph,
        mesh=mesh,
        model=sharded.model,
        pools=sized.pools,
        ladder=_ladder(resolved, sharded, reach),
        options=sharded.options,
        ledger=sized.ledger,
        adapters=sharded.adapters,
        images=sharded.images,
        refused_products=sharded.refused,
        why_bounded=why,
    )


# -- shard -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sharded:
    """The model on its mesh."""

    graph: nnx.GraphDef
    model: ShardedModel
    options: StepOptions
    adapters: AdapterSlots | None
    images: ImageSlots | None
    refused: dict[str, str]


def _shard(resolved: Resolved) -> _Sharded:
    spec, mesh = resolved.spec, resolved.mesh
    graph, parameters = registry.abstract_parts(spec, resolved.dtype)
    model = shard_model(spec.attention_of, parameters, mesh, resolved.shape)
    refused: dict[str, str] = {}
    if resolved.config.product_implementation == "mosaic_tpu" and spec.forms:
        abstract = registry.abstract_model(spec, resolved.dtype)
        refused = give_kernels(abstract, spec.forms, model.local_shapes, resolved.dtype, resolved.target)
        graph, _ = registry.unbind(abstract)
    local = spec.with_attention(lambda own: on_one_device(own, resolved.shape.tp))
    token, _ = resolved.one_block(local, 1)[0]
    options = StepOptions(
        spec=spec,
        dtype=resolved.dtype,
        target=resolved.target,
        local=local,
        shards=shards_of(mesh),
        expert_shards=expert_shards_of(mesh, resolved.shape),
        block_size=resolved.config.block_size or resolved.target.block_size(token.values.size * token.dtype.itemsize),
        implementation=resolved.implementation,
        invariant=resolved.config.invariant,
        tiles=resolved.config.attention_tiles,
        gives_experts=resolved.config.return_routed_experts,
        products="mosaic_tpu" if resolved.config.product_implementation == "mosaic_tpu" else "xla",
    )
    adapters = adapter_slots(resolved.config, model, resolved.dtype, mesh)
    images = image_slots(resolved.config, spec, model.targets, resolved.dtype, mesh)
    return _Sharded(graph=graph, model=model, options=options, adapters=adapters, images=images, refused=refused)


# -- bound -------------------------------------------------------------------------------------------------


def _bound(config: EngineConfig, resolved: Resolved, sharded: _Sharded) -> tuple[Resolved, _Sharded, str]:
    """Both with blocks and rows that attention has room for, where the config leaves them open; and why, in a sentence.

    Whatever requests will come: jobs share their executables.
    """
    limits, why = _buckets(resolved, sharded, None).choose(
        _limits(resolved, sharded),
        leaves_blocks=config.block_size is None,
        leaves_rows=config.max_num_seqs is None,
    )
    chosen = dataclasses.replace(resolved.config, max_num_seqs=limits.max_num_seqs)
    options = dataclasses.replace(sharded.options, block_size=limits.block_size)
    return dataclasses.replace(resolved, config=chosen), dataclasses.replace(sharded, options=options), why


# -- size --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sized:
    """All pools of the mesh, and where the memory of one device goes."""

    pools: Pools
    ledger: Ledger


def _size(resolved: Resolved, sharded: _Sharded) -> _Sized:
    config, spec, mesh, dtype = resolved.config, resolved.spec, resolved.mesh, resolved.dtype
    block_size, model = sharded.options.block_size, sharded.model
    form = {
        "block_size": block_size,
        "kv_dtype": KV_DTYPES[resolved.kv_dtype],
        "implementation": resolved.implementation,
    }
    groups = _count_blocks(resolved, sharded, block_bytes(sharded.options.local, target=resolved.target, **form))
    kv = kv_shapes(sharded.options.local, num_blocks=[group.num_blocks + 1 for group in groups], **form)
    caching = config.enable_prefix_caching
    num_prompts = 1 + (config.max_cached_prompts if caching else 0)
    num_states = 1 + config.num_rows + (config.max_state_snapshots if caching else 0)
    record_words = sampling.RECORD_WORDS + resolved.max_model_len
    most_tokens = _ladder_of(_limits(resolved, sharded), resolved, None).buckets[-1].num_tokens  # of any job
    local = Pools(
        kv=tuple(map(kv.get, range(spec.num_hidden_layers))),
        states=((),) * spec.num_hidden_layers,
        slots=jax.ShapeDtypeStruct((config.num_rows + 1, record_words), jnp.int32),
        prompts=jax.ShapeDtypeStruct((num_prompts, spec.hidden_size), dtype),
        masks=jax.ShapeDtypeStruct((config.num_rows + 1, ceil_div(spec.vocab_size, 32)), jnp.int32),
        hidden=jax.ShapeDtypeStruct((most_tokens, spec.hidden_size), dtype),
    )
    of_blocks = pools_on_mesh(local, mesh)
    bytes_of_host_block = host_block_bytes(of_blocks.kv)
    pools = with_states(of_blocks, spec, registry.state_arrays(spec, dtype), num_states, mesh)
    states = jax.tree.leaves(pools.states)
    ledger = Ledger(
        weights_bytes=model.weights_bytes,
        adapters_bytes=0 if sharded.adapters is None else sharded.adapters.bytes,
        images_bytes=0 if sharded.images is None else sharded.images.bytes,
        slots_bytes=local.slots.size * 4,
        prompts_bytes=local.prompts.size * dtype.itemsize,
        masks_bytes=local.masks.size * 4,
        hidden_bytes=local.hidden.size * dtype.itemsize,
        state_bytes=sum(map(local_bytes, states)) // num_states,
        num_states=num_states if spec.state_layers else 0,
        groups=groups,
        block_size=block_size,
        num_shards=mesh.shape[DATA],
        padded_bytes=sum(pool.padded_bytes for pool in kv.values()),
        host_block_bytes=bytes_of_host_block,
        num_host_blocks=choose_num_host_blocks(
            host_cache_bytes=config.host_cache_bytes if caching else 0,
            block_bytes=bytes_of_host_block,
            block_size=block_size,
            num_shards=mesh.shape[DATA],
        ),
    )
    return _Sized(pools=pools, ledger=ledger)


def _count_blocks(resolved: Resolved, sharded: _Sharded, bytes_by_group: list[int]) -> tuple[GroupBlocks, ...]:
    """The blocks of each cache group, as asked or as many as fit. bytes_by_group: of one block on one device."""
    config, block_size, spec = resolved.config, sharded.options.block_size, resolved.spec
    copies = [head_copies(spec.attention_of(group.layers[0]), resolved.shape.tp) for group in spec.kv_groups]

    def groups(num_blocks: int) -> tuple[GroupBlocks, ...]:
        counts = [
            pool_blocks(
                group.window,
                num_blocks,
                block_size=block_size,
                max_num_seqs=config.num_rows,
                max_num_batched_tokens=config.max_num_batched_tokens,
                keeps_cache=config.enable_prefix_caching,
            )
            for group in spec.kv_groups
        ]
        each = zip(counts, bytes_by_group, copies, strict=True)
        return tuple(GroupBlocks(num_blocks=n, block_bytes=b, head_copies=c) for n, b, c in each)

    def kv_bytes(num_blocks: int) -> int:
        return sum((group.num_blocks + 1) * group.block_bytes for group in groups(num_blocks))

    row_bytes = kv_bytes(ceil_div(resolved.max_model_len, block_size))
    return groups(
        choose_num_blocks(
            num_blocks=config.num_blocks,
            kv_memory_bytes=_kv_memory_bytes(config, resolved.mesh, sharded.model.weights_bytes, row_bytes),
            kv_bytes=kv_bytes,
            block_size=block_size,
            max_model_len=resolved.max_model_len,
            max_num_seqs=config.num_rows,
        )
    )


def _kv_memory_bytes(config: EngineConfig, mesh: Mesh, weights_bytes: int, row_bytes: int) -> int:
    if config.kv_memory_bytes is not None or config.num_blocks is not None:
        return config.kv_memory_bytes or 0  # the number of blocks counts, and devices that are not here tell no memory
    return smallest(cpu_pool_bytes(mesh.devices.flatten().tolist(), weights_bytes, row_bytes))


# -- ladder ------------------------------------------------------------------------------------------------


def _limits(resolved: Resolved, sharded: _Sharded) -> Limits:
    return Limits(
        max_num_seqs=resolved.config.num_rows,
        max_num_batched_tokens=resolved.config.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        block_size=sharded.options.block_size,
    )


def _ladder_of(limits: Limits, resolved: Resolved, reach: Reach | None) -> Ladder:
    return make_ladder(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        table_width=choose_table_width(limits.max_model_len, limits.block_size, reach),
        invariant=resolved.config.invariant,
        accelerator=resolved.target.platform != "cpu",
        adapters=resolved.config.max_adapters > 0,
        images=resolved.spec.vision is not None,
        reach=reach,
    )


def _ladder(resolved: Resolved, sharded: _Sharded, reach: Reach | None) -> Ladder:
    """The buckets. Raises ValueError where one does not fit the target."""
    limits = _limits(resolved, sharded)
    _buckets(resolved, sharded, reach).refuse(limits)
    return _ladder_of(limits, resolved, reach)


def _buckets(resolved: Resolved, sharded: _Sharded, reach: Reach | None) -> Buckets:
    return Buckets(
        options=sharded.options,
        ladder_of=lambda limits: _ladder_of(limits, resolved, reach),
        pools_of=lambda limits: resolved.one_block(sharded.options.local, limits.block_size),
    )
