"""The step: a pure function of (weights, kv, slots, prompts, packed input) to (kv, slots, prompts, rows, prompt, last).

Embed, layers, logits of the rows that sample, draw, write the token where the next step reads it. The
function is made for one bucket; everything else is data. `rows` [R, words] and `prompt` [T, words] are int32
words as `sampling.unpack` reads them, of the rows that sample and of prompt tokens asked for. `last` [R, D] is the
final hidden state of each row's last token; it stays on the device unless an embedding is asked for. Arguments and
results are plain tuples and arrays, because executables are kept with their trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ferrum_jax import sampling
from ferrum_jax.cache.pools import Pools
from ferrum_jax.layers.attention import ForwardContext
from ferrum_jax.models.registry import bind
from ferrum_jax.runtime.buckets import INVARIANT_ROWS, Bucket
from ferrum_jax.runtime.inputs import StepInputs, blob_size, unpack
from ferrum_jax.sharding import DATA, Shards, crosses_processes, formats, on_mesh, partition, partitions
from ferrum_jax.spec import ModelSpec
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention import (
    AttentionConfig,
    GpuConfig,
    RaggedBatch,
    TpuConfig,
    make_schedule,
    paged_attention,
)
from pallas_kernels.state_rows import StateRows
from pallas_kernels.target import Target

# Traced once for all layers and, where shapes agree, for all buckets; XLA inlines the calls.
_attend = jax.jit(paged_attention, static_argnames=("scale", "soft_cap", "implementation"))
_sample = jax.jit(sampling.sample)

# Of a TPU's compiler. Layers have equal code: compiled and kept once it takes a third less time and a seventh of the
# memory, for about six bundles more an operation, which call it (docs/performance.md). A dot within a dot, the MLP's up
# within its down, would compute the inner one several times over.
_TPU_OPTIONS = {"xla_tpu_enable_deduplicated_calls": "true", "xla_tpu_dot_dot_fusion": "false"}
# TPU7x keeps 16-bit arrays of a program in tiles of 16 rows and its arguments in tiles of 8. Weights that a loop reads,
# the experts' and the one of the logits, would be copied in each step. With tiles of 8 for both nothing is.
_TPU7X_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"}

LOGIT_TILE = 32  # rows whose logits exist at once in a mixed bucket
INVARIANT_EXPERT_TILE = 16


StepResult = tuple[tuple[jax.Array, ...], jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What is fixed for all steps of an engine.

    shards: devices that share the work of a step. expert_shards: data shards that have their experts together.
    num_heads: query heads of one device. target: one of them.
    """

    spec: ModelSpec
    dtype: jnp.dtype
    target: Target
    num_heads: int
    shards: Shards
    expert_shards: Shards
    block_size: int
    implementation: str  # of attention; experts are plain XLA on every platform
    invariant: bool


def make_step(
    graph: nnx.GraphDef, names: tuple[str, ...], bucket: Bucket, pools: Pools, options: StepOptions
) -> Callable[..., StepResult]:
    """The step of a bucket; weights are in the order of `names`, kv, slots and prompts are to be donated.

    kv: the arrays of `pools.kv`, whose tree alone is read here.
    """
    tree = jax.tree.structure(pools.kv)

    def step(
        weights: tuple[jax.Array, ...], kv: tuple[jax.Array, ...], slots: jax.Array, prompts: jax.Array, blob: jax.Array
    ) -> StepResult:
        model = bind(graph, dict(zip(names, weights, strict=True)))
        inputs = unpack(blob, bucket, len(options.spec.kv_groups))
        tokens = _lay_out_tokens(inputs, bucket.num_tokens)
        token_ids = sampling.read_tokens(slots, tokens.slots, tokens.positions)
        layers = list(jax.tree.unflatten(tree, kv))
        context = _forward_context(layers, inputs, tokens, bucket, options)
        hidden = model(token_ids, tokens.positions, context)  # [T, D]
        asked = sampling.wants_prompt_logprobs(slots, tokens.slots, tokens.positions)
        by_row = _divide_rows(model.logits, options)
        prompt = sampling.prompt_logprobs(hidden, by_row, slots, tokens.slots, tokens.positions, asked)
        last = _last_states(hidden, prompts, inputs, tokens)
        rows = _sample_rows(by_row, last, slots, inputs, bucket, options)
        slots = _append(slots, rows, prompt, inputs)
        prompts = _keep_states(prompts, last, rows, inputs)
        return tuple(jax.tree.leaves(layers)), slots, prompts, rows, prompt, last

    return step


def trace_step(
    graph: nnx.GraphDef,
    weights: Mapping[str, jax.ShapeDtypeStruct],
    pools: Pools,
    bucket: Bucket,
    options: StepOptions,
    mesh: Mesh,
) -> jax.stages.Traced:
    """The step of a bucket on a mesh, ready to be lowered: one program that every device runs on its own parts.

    weights, pools: shapes with their shardings. All pools are donated.
    """
    step = make_step(graph, tuple(weights), bucket, pools, options)
    kv = pools.flat_kv()
    words = blob_size(bucket, len(options.spec.kv_groups))
    blob = on_mesh(mesh, (words,), jnp.int32, "words")
    arguments = (tuple(weights.values()), kv, pools.slots, pools.prompts, blob)
    if mesh.size > 1:
        found = (partition("rows", None), partition("tokens", None), partition("rows", None))
        if crosses_processes(mesh):
            step, found = _gather_results(step), (PartitionSpec(),) * 3
        results = (*partitions(arguments[1:4]), *found)
        step = jax.shard_map(step, mesh=mesh, in_specs=partitions(arguments), out_specs=results, check_vma=False)
    placed = (formats(kv), None, None, None, None, None)  # pools come back as they went in
    chosen = _compiler_options(options.target)
    jitted = jax.jit(step, donate_argnums=(1, 2, 3), out_shardings=placed, compiler_options=chosen)
    return jitted.trace(*arguments)


def _compiler_options(target: Target) -> dict[str, str] | None:
    """What a step asks of its target's compiler."""
    if target.platform != "tpu":
        return None
    return _TPU_OPTIONS | (_TPU7X_OPTIONS if target.generation == "v7x" else {})


def trace_write_slot(pools: Pools, mesh: Mesh) -> jax.stages.Traced:
    """The write of a record into a slot of each data shard, of which all but one are beyond its pool, to be lowered."""

    def write(slots: jax.Array, slot: jax.Array, record: jax.Array) -> jax.Array:
        return sampling.write_slot(slots, slot[0], record)

    record = jax.ShapeDtypeStruct(pools.slots.shape[1:], jnp.int32)
    arguments = (pools.slots, on_mesh(mesh, (1,), jnp.int32, "slots"), record)
    if mesh.size > 1:
        specs = (*partitions(arguments[:2]), partition(None))
        write = jax.shard_map(write, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(write, donate_argnums=(0,)).trace(*arguments)


def _gather_results(step: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """The step, with the results of all data shards on every device: a process reads those of its own devices alone."""

    def gathered(*arguments: Any) -> StepResult:
        kv, slots, prompts, *found = step(*arguments)
        rows, prompt, last = (jax.lax.all_gather(x, DATA, axis=0, tiled=True) for x in found)
        return kv, slots, prompts, rows, prompt, last

    return gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """Where each flat token of the step belongs; padding tokens have slot 0, position 0."""

    slots: jax.Array  # [T] int32
    positions: jax.Array  # [T] int32
    are_real: jax.Array  # [T] bool, False for padding
    offsets: jax.Array  # [R] int32, first flat token of each row


def _lay_out_tokens(inputs: StepInputs, num_tokens: int) -> _Tokens:
    """Rows stand one after the other: token t belongs to the row whose range [offset, offset + count) holds it."""
    ends = jnp.cumsum(inputs.counts)
    offsets = ends - inputs.counts
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, t, side="right").astype(jnp.int32), len(offsets) - 1)
    real = t < ends[-1]
    positions = jnp.where(real, inputs.starts[rows] + t - offsets[rows], 0)
    slots = jnp.where(real, inputs.slots[rows], 0)
    return _Tokens(slots=slots, positions=positions, are_real=real, offsets=offsets)


def _forward_context(
    layers: list[Any], inputs: StepInputs, tokens: _Tokens, bucket: Bucket, options: StepOptions
) -> ForwardContext:
    """The context that a model's layers call; it leaves each layer's pool in `layers`."""
    config = attention_config(bucket, options, layers[options.spec.kv_groups[0].layers[0]])
    schedule_of: dict[int, Any] = {}  # by layer
    for group, table in zip(options.spec.kv_groups, inputs.block_tables, strict=True):
        batch = RaggedBatch(
            block_tables=table, starts=inputs.starts, counts=inputs.counts, query_offsets=tokens.offsets
        )
        schedule = make_schedule(
            batch,
            num_tokens=bucket.num_tokens,
            block_size=options.block_size,
            config=config,
            window=group.window,
            implementation=options.implementation,
        )
        schedule_of |= dict.fromkeys(group.layers, schedule)

    def attend(
        layer: int, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, **how: Any
    ) -> jax.Array:
        schedule = schedule_of[layer]
        assert schedule.window == window, f"layer {layer} has window {window}, its cache group {schedule.window}"
        out, layers[layer] = _attend(q, k, v, layers[layer], schedule, implementation=options.implementation, **how)
        return out

    rows = _state_rows(inputs, tokens, bucket, options)

    def recur(
        layer: int, shapes: Any, compute: Callable[[Any, StateRows], tuple[jax.Array, Any]], num_tokens: int
    ) -> jax.Array:
        kept = [(array.shape[1:], array.dtype) for array in jax.tree.leaves(layers[layer])]
        asked = [(state.shape, state.dtype) for state in jax.tree.leaves(shapes)]
        assert kept == asked, f"layer {layer} has states {asked}, its pool {kept}"
        out, layers[layer] = compute(layers[layer], rows)
        return out

    expert_tile = INVARIANT_EXPERT_TILE if options.invariant else None
    return ForwardContext(
        attend=attend,
        recur=recur,
        expert_tile=expert_tile,
        shards=options.shards,
        expert_shards=options.expert_shards,
        is_token=tokens.are_real,
    )


def _state_rows(inputs: StepInputs, tokens: _Tokens, bucket: Bucket, options: StepOptions) -> StateRows:
    """The rows as recurrent layers see them, two at least.

    XLA reads a single one again wherever it is used, also after its write, and copies the pool for that.
    """
    slots, starts, counts, offsets = inputs.state_slots, inputs.starts, inputs.counts, tokens.offsets
    if bucket.num_rows == 1:
        slots, starts, counts = (jnp.pad(x, (0, 1)) for x in (slots, starts, counts))
        offsets = jnp.append(offsets, counts[0])
    return StateRows(
        slots=slots,
        starts=starts,
        counts=counts,
        offsets=offsets,
        decode_only=bucket.decode_only,
        sequential=options.invariant,
    )


def attention_config(bucket: Bucket, options: StepOptions, pool: KVPool) -> AttentionConfig | TpuConfig | GpuConfig:
    """The tiles of a bucket's attention. pool: of a layer and one device, or its shapes.

    Raises ValueError where the bucket does not fit the implementation on the target.
    """
    if options.implementation == "mosaic_tpu":
        return TpuConfig.choose(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            max_blocks=bucket.table_width,
            num_heads=options.num_heads,
            dtype=options.dtype,
            pool=pool,
            decode_only=bucket.decode_only,
            target=options.target,
        )
    if options.implementation == "mosaic_gpu":
        return GpuConfig.choose(
            num_heads=options.num_heads,
            pool=pool,
            decode_only=bucket.decode_only,
            target=options.target,
            dtype=options.dtype,
        )
    return AttentionConfig.choose(
        num_tokens=bucket.num_tokens,
        block_size=options.block_size,
        decode_only=bucket.decode_only,
        invariant=options.invariant,
    )


def _divide_rows(logits: Callable[[jax.Array], jax.Array], options: StepOptions) -> sampling.ByRow:
    """Logits, which come in stretches of the vocabulary, are exchanged so that each device has some rows of them whole.

    So a device samples its rows as if it were alone, and the logits cross the wire once, each to one device.
    """
    shards = options.shards

    def by_row(hidden: jax.Array, compute: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
        n = hidden.shape[0]
        padded = [_pad_rows(a, -n % shards.size) for a in (hidden, *rows)]
        some = shards.exchange(logits(padded[0]))[:, : options.spec.vocab_size]  # [n / tp, V]
        return shards.gather(compute(some, *map(shards.own, padded[1:])))[:n]

    return by_row


def _pad_rows(a: jax.Array, count: int) -> jax.Array:
    return jnp.pad(a, ((0, count), *((0, 0),) * (a.ndim - 1)))


def _last_states(hidden: jax.Array, prompts: jax.Array, inputs: StepInputs, tokens: _Tokens) -> jax.Array:
    """[R, D], from [T, D] and [Q, D]: the state of each row's last token, of this step or kept from an equal prompt."""
    computed = hidden[jnp.maximum(tokens.offsets + inputs.counts - 1, 0)]
    return jnp.where(inputs.source_slots[:, None] > 0, prompts[inputs.source_slots], computed)


def _keep_states(prompts: jax.Array, last: jax.Array, rows: jax.Array, inputs: StepInputs) -> jax.Array:
    """The prompt slots with the states of the rows that have a target; after every read, as in `_append`."""
    after_rows = jnp.minimum(jnp.min(rows[:, 0]), 0)
    targets = jnp.where(inputs.target_slots > 0, inputs.target_slots + after_rows, len(prompts))
    return prompts.at[targets].set(last, mode="drop")


def _sample_rows(
    by_row: sampling.ByRow,
    states: jax.Array,  # [R, D]
    slots: jax.Array,
    inputs: StepInputs,
    bucket: Bucket,
    options: StepOptions,
) -> jax.Array:
    """[R, words]: samples tile by tile of the rows that exist."""
    R = bucket.num_rows
    tile = INVARIANT_ROWS if options.invariant else R if bucket.decode_only else min(R, LOGIT_TILE)
    positions = inputs.starts + inputs.counts  # the position that the drawn token takes
    active = inputs.samples > 0
    padded = -R % tile  # the last tile must not reach back into rows already done
    states, positions, active, row_slots = (_pad_rows(a, padded) for a in (states, positions, active, inputs.slots))

    def draw(logits: jax.Array, *rows: jax.Array) -> jax.Array:
        return _sample(logits, slots, *rows).result

    def one_tile(i: jax.Array, rows: jax.Array) -> jax.Array:
        def part(a: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(a, i * tile, tile)

        drawn = by_row(part(states), draw, part(row_slots), part(positions), part(active))
        return jax.lax.dynamic_update_slice_in_dim(rows, drawn, i * tile, 0)

    words = jnp.zeros((R + padded, sampling.RESULT_WORDS), jnp.int32)
    if R + padded == tile:
        words = one_tile(jnp.int32(0), words)
    else:
        words = jax.lax.fori_loop(0, -(-inputs.num_rows // tile), one_tile, words)
    return words[:R]


def _append(slots: jax.Array, rows: jax.Array, prompt: jax.Array, inputs: StepInputs) -> jax.Array:
    """The slots with each sampled token at the position it takes, where the next step reads it.

    XLA writes in place only what is written after every read, and it orders by data alone: so the position
    depends on `prompt`, whose computation reads slots too. Token ids are never negative.
    """
    after_prompt = jnp.minimum(jnp.min(prompt[:, 0]), 0)
    positions = inputs.starts + inputs.counts + after_prompt
    return sampling.append_tokens(slots, inputs.slots, positions, rows[:, 0], inputs.samples > 0)
