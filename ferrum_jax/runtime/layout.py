"""Layout: everything that follows from spec, config and device, before a weight is read or a step compiled.

    settle ─► shard ─► size ─► ladder

Each step returns a value, and the next ones read it: what a config left open (`settled.py`), the model as it lies on
the mesh, the pools with what they take of a device, the buckets.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes, Reach
from ferrum_jax.io.ints import ceil_div, pool_blocks
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers.formed_weight import give_kernels
from ferrum_jax.models.layers.moe import give_kernels_to_experts
from ferrum_jax.models.sharding import ShardedModel, head_copies, local_bytes, shard_model
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import Ladder
from ferrum_jax.runtime.distributed.processes import smallest
from ferrum_jax.runtime.draft import DraftLayer
from ferrum_jax.runtime.lora.adapter_slots import AdapterSlots, adapter_slots
from ferrum_jax.runtime.media_encoders.clip_slots import ClipSlots, clip_slots
from ferrum_jax.runtime.media_encoders.image_slots import ImageSlots, image_slots
from ferrum_jax.runtime.pools.budget import (
    GroupBlocks,
    Ledger,
    choose_num_blocks,
    choose_num_host_blocks,
    cpu_pool_bytes,
)
from ferrum_jax.runtime.pools.host_blocks import host_block_bytes
from ferrum_jax.runtime.pools.pools import Pools, block_bytes, kv_shapes, pools_on_mesh, with_states
from ferrum_jax.runtime.sample import Head
from ferrum_jax.runtime.settled import Room, Settled, settle
from ferrum_jax.runtime.step_options import StepOptions
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLayout:
    """A model on a mesh, of whatever kind. max_num_seqs: rows of a data shard."""

    spec: registry.AnySpec
    dtype: jnp.dtype
    max_model_len: int
    max_num_seqs: int
    graph: nnx.GraphDef
    mesh: Mesh
    model: ShardedModel
    ledger: Ledger

    @property
    def target(self) -> Target:
        """A device of the mesh."""
        return Target.of_device(self.mesh.devices.flat[0])

    @property
    def kv_dtype(self) -> str:
        return self.dtype.name

    @property
    def why_bounded(self) -> str:
        """In a sentence why something is smaller than by default; "" where nothing is."""
        return ""

    @property
    def recorded(self) -> dict[str, str]:
        """The entries of a job's record about its steps, beside the machine."""
        return {}

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

    refused_products: weights in a form that the named kernels do not multiply, with the reasons; XLA does.
    """

    spec: ModelSpec
    settled: Settled
    pools: Pools  # of ShapeDtypeStructs
    ladder: Ladder
    adapters: AdapterSlots | None = None
    images: ImageSlots | ClipSlots | None = None
    refused_products: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def head(self) -> Head:
        """The head, which makes logits."""
        return Head.of(self.graph, self.decoder_targets, self.pools.hidden, self.options, self.adapters)

    @functools.cached_property
    def draft_layer(self) -> DraftLayer | None:
        """The layer that predicts one token more, or None."""
        return DraftLayer(self.head) if self.ladder.predicts else None

    @functools.cached_property
    def decoder_targets(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The weights that a forward takes: all but a tower's."""
        return {name: target for name, target in self.targets.items() if not registry.of_tower(name)}

    @property
    def target(self) -> Target:
        return self.settled.target

    @property
    def recorded(self) -> dict[str, str]:
        return {"implementation": self.options.recorded, "block_size": str(self.options.block_size)}

    @property
    def options(self) -> StepOptions:
        return self.settled.options

    @property
    def kv_dtype(self) -> str:
        return self.settled.kv_dtype

    @property
    def why_bounded(self) -> str:
        return self.settled.why_bounded

    @property
    def num_rows(self) -> int:
        """Rows that all data shards run at once."""
        return self.max_num_seqs * self.num_shards

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request for which block tables are wide enough."""
        return min(self.max_model_len, self.ladder.buckets[-1].table_width * self.options.block_size)

    def sizes(self, config: EngineConfig) -> EngineSizes:
        """A data shard's sizes: the config's, within the layout."""
        ledger, groups = self.ledger, self.ledger.groups
        rows, most = config.max_num_seqs or self.max_num_seqs, config.num_blocks or ledger.num_blocks
        return EngineSizes(
            block_size=ledger.block_size,
            group_blocks=[min(most, group.num_blocks) for group in groups],
            max_num_seqs=rows,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            windows=[group.window for group in self.spec.kv_groups],
            block_bytes=[group.block_bytes for group in groups],
            num_host_blocks=_num_host_blocks(config, ledger.host_block_bytes, ledger.block_size, ledger.num_shards),
            host_block_bytes=self._host_block_bytes(),
            max_cached_prompts=min(config.max_cached_prompts, self.pools.prompts.shape[0] // self.num_shards - 1),
            min_cached_prompt_tokens=config.min_cached_prompt_tokens,
            max_snapshots=min(config.max_state_snapshots, ledger.num_states - 1 - rows) if ledger.num_states else None,
            state_bytes=ledger.state_bytes,
            num_shards=ledger.num_shards,
            num_image_runs=0 if self.images is None else self.images.num_runs,
            max_image_patches=0 if self.images is None else self.images.max_patches,
            speculative_config=config.speculative_config,
            num_places=self.ladder.row_buckets[-1].num_rows,
        )

    def _host_block_bytes(self) -> list[int]:
        """Bytes that one block takes in host memory, for the layers of each cache group."""
        num_layers = [len(group.layers) for group in self.spec.kv_groups]
        return [round(self.ledger.host_block_bytes * count / sum(num_layers)) for count in num_layers]


def lay_out(
    spec: ModelSpec, config: EngineConfig, mesh: Mesh, reach: Reach | None = None, room: Room | None = None
) -> Layout:
    """The layout of an engine on a mesh. Raises ValueError with every reason why it cannot run here.

    reach: of the requests that will come, where they are known; it makes the ladder shorter, pools stay as they are.
    room: what memory decides where the config leaves it open; None takes what the config names.
    """
    settled = settle(spec, config, mesh, room)
    graph, model, refused = _shard(settled)
    adapters = adapter_slots(config, model, settled.dtype, mesh)
    images = _slots_of_tower(settled, model)
    pools, ledger = _size(settled, model, adapters, images)
    settled.buckets(reach).refuse(settled.limits)
    return Layout(
        spec=settled.spec,
        dtype=settled.dtype,
        max_model_len=settled.limits.max_model_len,
        max_num_seqs=settled.limits.max_num_seqs,
        graph=graph,
        mesh=mesh,
        model=model,
        settled=settled,
        pools=pools,
        ladder=settled.ladder(reach),
        ledger=ledger,
        adapters=adapters,
        images=images,
        refused_products=refused,
    )


# -- shard -------------------------------------------------------------------------------------------------


def _shard(settled: Settled) -> tuple[nnx.GraphDef, ShardedModel, dict[str, str]]:
    """The model on its mesh, and the weights that the named kernels do not multiply."""
    spec, dtype = settled.spec, settled.dtype
    graph, parameters = registry.abstract_parts(spec, dtype)
    model = shard_model(spec.attention_of, parameters, settled.mesh, settled.shape)
    refused: dict[str, str] = {}
    if settled.options.products != "xla" and (spec.forms or spec.experts is not None):
        abstract = registry.abstract_model(spec, dtype)
        refused = give_kernels(abstract, spec.forms, model.local_shapes, dtype, settled.target)
        if settled.options.products == "mosaic_tpu":
            refused |= give_kernels_to_experts(abstract, model.local_shapes, dtype, settled.target)
        graph, _ = registry.unbind(abstract)
    return graph, model, refused


def _slots_of_tower(settled: Settled, model: ShardedModel) -> ImageSlots | ClipSlots | None:
    """Where what the model's tower makes lies; None of a model without one."""
    spec, dtype, mesh = settled.spec, settled.dtype, settled.mesh
    clips = clip_slots(
        spec, settled.local, model.targets, dtype, mesh, num_clips=settled.num_clips, **settled.form_of_pools
    )
    return clips or image_slots(settled.config, spec, model.targets, dtype, mesh)


# -- size --------------------------------------------------------------------------------------------------


def _size(
    settled: Settled, model: ShardedModel, adapters: AdapterSlots | None, images: ImageSlots | ClipSlots | None
) -> tuple[Pools, Ledger]:
    """All pools of the mesh, and where the memory of one device goes."""
    config, spec, mesh, dtype = settled.config, settled.spec, settled.mesh, settled.dtype
    limits = settled.limits
    form = settled.form_of_pools
    groups = _count_blocks(settled, model.weights_bytes, block_bytes(settled.local, target=settled.target, **form))
    kv = kv_shapes(settled.local, num_blocks=[group.num_blocks + 1 for group in groups], **form)
    caching = config.enable_prefix_caching
    num_prompts = 1 + (config.max_cached_prompts if caching else 0)
    num_states = 1 + limits.max_num_seqs + (config.max_state_snapshots if caching else 0)
    record_words = sampling.RECORD_WORDS + limits.max_model_len
    most_tokens = settled.ladder().buckets[-1].num_tokens  # of any job
    local = Pools(
        kv=tuple(map(kv.get, range(spec.num_layers))),
        states=((),) * spec.num_layers,
        slots=jax.ShapeDtypeStruct((limits.max_num_seqs + 1, record_words), jnp.int32),
        prompts=jax.ShapeDtypeStruct((num_prompts, spec.hidden_size), dtype),
        masks=jax.ShapeDtypeStruct((1 + settled.most_places, ceil_div(spec.vocab_size, 32)), jnp.int32),
        hidden=jax.ShapeDtypeStruct((most_tokens, spec.hidden_size), dtype),
    )
    of_blocks = pools_on_mesh(local, mesh)
    bytes_of_host_block = host_block_bytes(of_blocks.kv)
    if isinstance(images, ClipSlots):
        of_blocks = dataclasses.replace(
            of_blocks, kv=tuple(images.pools.get(layer, own) for layer, own in enumerate(of_blocks.kv))
        )
    pools = with_states(of_blocks, spec, registry.state_arrays(spec, dtype), num_states, mesh)
    states = jax.tree.leaves(pools.states)
    ledger = Ledger(
        weights_bytes=model.weights_bytes,
        adapters_bytes=0 if adapters is None else adapters.bytes,
        images_bytes=0 if images is None else images.bytes,
        slots_bytes=local.slots.size * 4,
        prompts_bytes=local.prompts.size * dtype.itemsize,
        masks_bytes=local.masks.size * 4,
        hidden_bytes=local.hidden.size * dtype.itemsize,
        state_bytes=sum(map(local_bytes, states)) // num_states,
        num_states=num_states if spec.state_layers else 0,
        groups=groups,
        block_size=limits.block_size,
        num_shards=mesh.shape[DATA],
        padded_bytes=sum(pool.padded_bytes for pool in kv.values()),
        host_block_bytes=bytes_of_host_block,
        num_host_blocks=_num_host_blocks(config, bytes_of_host_block, limits.block_size, mesh.shape[DATA]),
    )
    return pools, ledger


def _num_host_blocks(config: EngineConfig, block_bytes: int, block_size: int, num_shards: int) -> int:
    """Blocks of a data shard's host tier."""
    return choose_num_host_blocks(
        host_cache_bytes=config.host_cache_bytes if config.enable_prefix_caching else 0,
        block_bytes=block_bytes,
        block_size=block_size,
        num_shards=num_shards,
    )


def _count_blocks(settled: Settled, weights_bytes: int, bytes_by_group: list[int]) -> tuple[GroupBlocks, ...]:
    """The blocks of each cache group, as asked or as many as fit. bytes_by_group: of one block on one device."""
    limits, room, spec = settled.limits, settled.room, settled.spec
    copies = [head_copies(spec.attention_of(group.layers[0]), settled.shape.tp) for group in spec.kv_groups]

    def groups(num_blocks: int) -> tuple[GroupBlocks, ...]:
        counts = [
            pool_blocks(
                group.window,
                num_blocks,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                keeps_cache=settled.config.enable_prefix_caching,
            )
            for group in spec.kv_groups
        ]
        each = zip(counts, bytes_by_group, copies, strict=True)
        return tuple(GroupBlocks(num_blocks=n, block_bytes=b, head_copies=c) for n, b, c in each)

    def kv_bytes(num_blocks: int) -> int:
        return sum((group.num_blocks + 1) * group.block_bytes for group in groups(num_blocks))

    row_bytes = kv_bytes(ceil_div(limits.max_model_len, limits.block_size))
    return groups(
        choose_num_blocks(
            num_blocks=room.num_blocks,
            kv_memory_bytes=_kv_memory_bytes(room, settled.mesh, weights_bytes, row_bytes),
            kv_bytes=kv_bytes,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
        )
    )


def _kv_memory_bytes(room: Room, mesh: Mesh, weights_bytes: int, row_bytes: int) -> int:
    if room.kv_memory_bytes is not None or room.num_blocks is not None:
        return room.kv_memory_bytes or 0  # the number of blocks counts, and devices that are not here tell no memory
    found = smallest(cpu_pool_bytes(mesh.devices.flatten().tolist(), weights_bytes, row_bytes))
    if found <= 0:
        raise ValueError(
            f"weights of {weights_bytes / 2**30:.2f} GiB leave nothing of this machine's free memory for keys and "
            "values; free some, quantise the weights (weights='int8'), or take a machine with more"
        )
    return found
