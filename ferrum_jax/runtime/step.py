"""The forward half of a step: a pure function of (weights, kv, slots, hidden, packed input) to (kv, hidden).

Token ids are read from the row slots, then embedding and layers; the final hidden states go to the front of `hidden`
[most tokens of a step, D], where `sample.py` reads those of the rows that sample, and tiles of prompt tokens. The
function is made for one bucket; everything else is data. Arguments and results are plain tuples and arrays, because
executables are kept with their trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from ferrum_jax.inputs.sizes import invariance
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.families.registry import bind
from ferrum_jax.models.layers.attention import ForwardContext, ImageTokens
from ferrum_jax.models.sharding import on_mesh
from ferrum_jax.models.spec import ModelSpec
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.runtime.handed_back import results_of, trace_part
from ferrum_jax.runtime.inputs import ForwardInputs, forward_words, unpack_forward
from ferrum_jax.runtime.layer_calls import ClipSchedule, LayerCalls, LayerSchedule
from ferrum_jax.runtime.lora.adapter_slots import AdapterSlots
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.step_options import (
    StepOptions,
    attention_config,
    chooses_keys,
    expert_dtype,
    implementation_of,
)
from pallas_kernels.indexer import make_indexer_schedule
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.low_rank import ExpertSlots, LowRankSlots, Pairs, pairs_of
from pallas_kernels.paged_attention import RaggedBatch, make_schedule
from pallas_kernels.row_recurrence import for_kernels
from pallas_kernels.state_rows import StateRows

ForwardResult = tuple[Any, ...]  # kv, hidden and, where they are asked for, the experts of each token


def make_forward(
    graph: nnx.GraphDef,
    names: tuple[str, ...],
    bucket: Bucket,
    pools: Pools,
    options: StepOptions,
    slots_of: AdapterSlots | None = None,
) -> Callable[..., ForwardResult]:
    """The forward of a bucket, whose packed input is unpacked; kv and hidden are to be donated.

    names: of the weights, in their order. kv: the arrays of `pools.caches`, whose tree alone is read here. With
    `options.gives_experts` the result has one more array, [T, layers with experts * X] of `expert_dtype`; padding has
    experts too. slots_of: of a bucket whose rows may name adapters.
    """
    tree = jax.tree.structure(pools.caches)

    def forward(
        weights: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],
        slots: jax.Array,
        hidden: jax.Array,
        inputs: ForwardInputs,
        adapters: tuple[jax.Array, ...] = (),
        images: jax.Array | None = None,
    ) -> ForwardResult:
        model = bind(graph, dict(zip(names, weights, strict=True)))
        tokens = lay_out_tokens(inputs, bucket.num_tokens)
        token_ids = sampling.read_tokens(slots, tokens.slots, tokens.positions)
        of_layers, states = jax.tree.unflatten(tree, kv)
        calls = LayerCalls(
            options,
            of_layers,
            states,
            schedules_of(dict(enumerate(of_layers[: options.spec.num_hidden_layers])), inputs, tokens, bucket, options),
            _state_rows(inputs, tokens, bucket, options),
            tokens.are_real,
            None if slots_of is None else _adapters(slots_of, adapters, tokens, options),
        )
        context = ForwardContext(
            run=calls,
            shards=options.shards,
            images=None if images is None else _image_tokens(images, inputs, tokens),
        )
        final = model(token_ids, rope_positions(inputs, tokens, options), context)  # [T, D]
        hidden = jax.lax.dynamic_update_slice_in_dim(hidden, final, 0, 0)
        experts = (_experts_of(calls.routed, options.spec),) if options.gives_experts else ()
        return tuple(jax.tree.leaves((calls.pools, calls.states))), hidden, *experts

    return forward


def _adapters(
    slots_of: AdapterSlots, arrays: tuple[jax.Array, ...], tokens: TokenLayout, options: StepOptions
) -> tuple[dict[str, LowRankSlots | ExpertSlots], Pairs]:
    """The slots of layers' weights by name, and which tokens of the step name them."""
    tile = {"tile": invariance.MIN_ROWS} if options.invariant else {}
    counts = {"num_tiles": slots_of.num_tiles, "slots_per_tile": slots_of.slots_per_tile}
    return slots_of.of_layers(arrays), pairs_of(tokens.adapter_slots, **counts, **tile)


def _experts_of(routed: list[jax.Array], spec: ModelSpec) -> jax.Array:
    """[T, layers with experts * X]: no axis is so short that a TPU would pad it."""
    assert spec.experts is not None and len(routed) == len(spec.routed_layers), "each layer with experts told them"
    return jnp.concatenate(routed, axis=1).astype(expert_dtype(spec.experts.num_experts))


def _image_tokens(pool: jax.Array, inputs: ForwardInputs, tokens: TokenLayout) -> ImageTokens:
    assert inputs.image_slots is not None, "the bucket is for tokens of images"
    ids = jnp.where(tokens.are_real, inputs.image_slots, 0)
    return ImageTokens(are_here=ids > 0, embeddings=pool[ids])


def rope_positions(inputs: ForwardInputs, tokens: TokenLayout, options: StepOptions) -> jax.Array:
    """[T] or, where they have sections and tokens may be of images, [3, T] int32: what heads are turned by."""
    rope = options.spec.attention.rope
    if rope is None or not rope.sections:
        return tokens.positions
    if inputs.rope_positions is not None:
        return inputs.rope_positions
    return tokens.positions + tokens.rope_shifts


def trace_forward(
    graph: nnx.GraphDef,
    weights: Mapping[str, jax.ShapeDtypeStruct],
    pools: Pools,
    bucket: Bucket,
    options: StepOptions,
    mesh: Mesh,
    adapters: AdapterSlots | None = None,
    images: jax.ShapeDtypeStruct | None = None,
) -> jax.stages.Traced:
    """The forward of a bucket on a mesh, ready to be lowered: one program that every device runs on its own parts.

    weights, pools, adapters, images: shapes with their shardings; what adapters or images have comes before the packed
    input. The arrays of kv and hidden are donated.
    """
    kv = pools.flat_caches()
    num_groups = len(options.spec.kv_groups)
    words = on_mesh(mesh, (forward_words(bucket, num_groups),), jnp.int32, "words")
    forward = make_forward(graph, tuple(weights), bucket, pools, options, adapters)
    more: tuple[Any, ...] = () if adapters is None else (tuple(jax.tree.leaves(adapters.pools)),)
    more = (images,) if bucket.imaged else more
    name = "images" if bucket.imaged else "adapters"

    def with_more(weights: Any, kv: Any, slots: Any, hidden: Any, *rest: Any) -> ForwardResult:
        inputs = unpack_forward(rest[-1], bucket, num_groups)
        return forward(weights, kv, slots, hidden, inputs, **dict(zip((name,), rest[:-1], strict=False)))

    arguments = (tuple(weights.values()), kv, pools.slots, pools.hidden, *more, words)
    results = results_of(bucket, pools, options, mesh)
    how: Any = {"mesh": mesh, "options": options, "decodes": bucket.decode_only}
    return trace_part(with_more, arguments, results, pools=(1, 3), **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Where each flat token of the step belongs; padding tokens have slot 0, position 0."""

    slots: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    are_real: jax.Array  # [T] bool, False for padding
    adapter_slots: jax.Array  # [T] int32, 0 for none
    rope_shifts: jax.Array  # [T] int32
    rows: jax.Array  # [T] int32
    offsets: jax.Array  # [R] int32, first flat token of each row


def lay_out_tokens(inputs: ForwardInputs, num_tokens: int) -> TokenLayout:
    """Rows stand one after the other: token t belongs to the row whose range [offset, offset + count) holds it."""
    ends = jnp.cumsum(inputs.counts)
    offsets = ends - inputs.counts
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.minimum(
        jnp.searchsorted(ends, t, side="right", method="compare_all").astype(jnp.int32), len(offsets) - 1
    )
    real = t < ends[-1]
    positions = jnp.where(real, inputs.starts[rows] + t - offsets[rows], 0)
    slots = jnp.where(real, inputs.slots[rows], 0)
    adapter_slots = jnp.where(real, inputs.adapter_ids[rows], 0)
    shifts = jnp.where(real, inputs.rope_shifts[rows], 0)
    return TokenLayout(
        slots=slots,
        positions=positions,
        are_real=real,
        adapter_slots=adapter_slots,
        rope_shifts=shifts,
        rows=rows,
        offsets=offsets,
    )


def schedules_of(
    layers: Mapping[int, Any], inputs: ForwardInputs, tokens: TokenLayout, bucket: Bucket, options: StepOptions
) -> dict[int, LayerSchedule]:
    """By layer, what its attention needs of the step. layers: the pools of those that are computed."""
    found: dict[int, LayerSchedule] = {}
    vision = options.spec.vision
    if across := [layer for layer in options.spec.cross_layers if layer in layers]:
        found |= dict.fromkeys(across, _across(layers[across[0]], inputs, tokens, bucket, options))
    for group, table in zip(options.spec.kv_groups, inputs.block_tables, strict=True):
        first = group.layers[0]
        if first not in layers:
            continue
        heads = options.local.attention_of(first).num_attention_heads
        implementation = implementation_of(bucket, options, layers[first])
        batch = RaggedBatch(
            block_tables=table,
            starts=inputs.starts,
            counts=inputs.counts,
            query_offsets=tokens.offsets,
            seen_ends=inputs.seen_ends if vision is not None and vision.sees_whole(group.window) else None,
        )
        sizes: dict[str, Any] = {"num_tokens": bucket.num_tokens, "block_size": options.block_size}
        schedule = make_schedule(
            batch,
            **sizes,
            config=attention_config(bucket, options, layers[first], heads),
            window=group.window,
            chunked=group.chunked,
            implementation=implementation,
        )
        indexer = None
        indexers = [own for own in map(options.spec.indexer_of, group.layers) if own is not None]
        for top_k, keys, local in {(own.top_k, own.group_size, own.local_groups) for own in indexers}:
            reads: Any = schedule if chooses_keys(bucket, options) else None
            how = {"top_k": top_k, "group": keys, "local": local}
            indexer = make_indexer_schedule(batch, **sizes, **how, attention=reads)
        of_layer = LayerSchedule(implementation=implementation, attention=schedule, indexer=indexer)
        found |= dict.fromkeys(group.layers, of_layer)
    return found


def _across(
    pool: KVPool, inputs: ForwardInputs, tokens: TokenLayout, bucket: Bucket, options: StepOptions
) -> LayerSchedule:
    """The schedule of layers that attend to a clip: each token is a row of its own, behind all positions."""
    sound = options.spec.sound
    assert sound is not None, "layers attend to a clip"
    size, T = options.block_size, bucket.num_tokens
    width = ceil_div(sound.num_positions, size)
    rows = dataclasses.replace(bucket, num_rows=T, table_width=width, decode_only=True, imaged=False)
    clips = jnp.where(tokens.are_real, inputs.clip_slots[tokens.rows], 0)
    of_clip, own = clips[:, None], jnp.arange(width, dtype=jnp.int32)[None]
    tables = jnp.where(of_clip > 0, 1 + (of_clip - 1) * width + own, 0)
    implementation = implementation_of(rows, options, pool)
    attention = make_schedule(
        RaggedBatch(
            block_tables=tables,
            starts=jnp.full(T, sound.num_positions - 1, jnp.int32),
            counts=(clips > 0).astype(jnp.int32),
            query_offsets=jnp.arange(T, dtype=jnp.int32),
        ),
        num_tokens=T,
        block_size=size,
        config=attention_config(
            rows, options, pool, options.local.attention_of(options.spec.cross_layers[0]).num_attention_heads
        ),
        implementation=implementation,
    )
    last = (sound.num_positions - 1) % size
    across = ClipSchedule(attention=attention, blocks=tables[:, -1], offset=last)
    return LayerSchedule(implementation=implementation, attention=across)


def _state_rows(inputs: ForwardInputs, tokens: TokenLayout, bucket: Bucket, options: StepOptions) -> StateRows:
    """The rows as recurrent layers see them.

    They are padded to at least two: with one, XLA re-reads the state after writing it and so copies the pool.
    """
    slots, starts, counts, offsets = inputs.state_slots, inputs.starts, inputs.counts, tokens.offsets
    if bucket.num_rows == 1:
        slots, starts, counts = (jnp.pad(x, (0, 1)) for x in (slots, starts, counts))
        offsets = jnp.append(offsets, counts[0])
    rows = StateRows(
        slots=slots,
        starts=starts,
        counts=counts,
        offsets=offsets,
        decode_only=bucket.decode_only,
        sequential=options.invariant,
    )
    return for_kernels(rows, num_tokens=bucket.num_tokens) if options.recurrence == "mosaic_tpu" else rows
