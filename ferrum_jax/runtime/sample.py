"""The other half of a step: hidden states to logits, and what is made of these. The only place that has logits.

`sample`, one executable for each row bucket: (head, slots, prompts, masks, hidden, packed input) to (slots, prompts,
rows, last). It draws a token for each row and writes it where the next forward reads it. `rows` [R, words] are int32
words as `sampling.unpack` reads them and, with `options.gives_masks`, then masks of what could be drawn. `last` [R, D]
is the final hidden state of each row's last token; it stays on the device unless an embedding is asked for.
`launch`, one for each `LaunchBucket`, is a forward and what samples its rows: (weights, kv, slots, hidden, packed input
of the forward) to (kv, slots, hidden, rows, and the forward's results). No row is embedded or has to do with cached
prompts, and none asks for more than the bucket's draw; a step with such rows takes the halves. With a horizon each row
takes as many turns as its count says, until it ends; `rows` has its draws side by side.
`score`, one executable: (head, slots, hidden, packed input) to ([n, words],) of a tile of prompt tokens.
`score_all`, another: the same with a word for each token of the vocabulary.
head: the weights that logits are made of, and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from checkpoints.stored_weight import weight_of
from ferrum_jax.inputs.sizes import invariance
from ferrum_jax.models.families.registry import bind
from ferrum_jax.models.layers.adapted_weight import put_adapters
from ferrum_jax.models.sharding import on_mesh, trace_update
from ferrum_jax.models.sharding.shards import DATA
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import LaunchBucket, RowBucket
from ferrum_jax.runtime.handed_back import result, results_of, trace_part
from ferrum_jax.runtime.inputs import (
    ForwardInputs,
    SampleInputs,
    forward_words,
    sample_words,
    score_words,
    unpack_forward,
    unpack_sample,
    unpack_score,
)
from ferrum_jax.runtime.lora.adapter_slots import EMBEDDING, HEAD_PART, AdapterSlots
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.step import make_forward
from ferrum_jax.runtime.step_options import StepOptions
from pallas_kernels.low_rank import pairs_of

MASKS_AT_ONCE = 32  # that one call writes
SCORE_TILE = 64  # prompt tokens whose logits exist at once
assert SCORE_TILE == invariance.MIN_ROWS, "invariant tiles of rows and of prompt tokens have one shape"

Shapes = Mapping[str, jax.ShapeDtypeStruct]
SampleResult = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
# traced once for all row buckets that have a tile of one shape
_sample = jax.jit(sampling.sample, static_argnames="gives_masks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """Makes logits of hidden states: the structure of a model, with only the named weights."""

    graph: nnx.GraphDef
    weights: Shapes  # all of the model
    names: tuple[str, ...]
    options: StepOptions
    adapters: AdapterSlots | None = None  # those with slots of the head

    @classmethod
    def of(
        cls,
        graph: nnx.GraphDef,
        weights: Shapes,
        hidden: jax.ShapeDtypeStruct,
        options: StepOptions,
        adapters: AdapterSlots | None = None,
    ) -> Head:
        """The head of a model, which is the weights that its logits read, and slots of adapters beside it.

        hidden: the shape of `Pools.hidden`.
        """

        def logits(values: tuple[jax.Array, ...], states: jax.Array) -> jax.Array:
            return bind(graph, dict(zip(weights, values, strict=True))).logits(states)

        whole = tuple(jax.ShapeDtypeStruct(weight.shape, weight.dtype) for weight in weights.values())
        one = jax.ShapeDtypeStruct((1, hidden.shape[1]), hidden.dtype)
        traced = jax.make_jaxpr(logits)(whole, one).jaxpr
        read = {id(variable) for equation in traced.eqns for variable in equation.invars}
        names = tuple(name for name, variable in zip(weights, traced.invars, strict=False) if id(variable) in read)
        own = None if adapters is None or adapters.head is None else adapters
        return cls(graph=graph, weights=weights, names=names, options=options, adapters=own)

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        of_adapters = () if self.adapters is None else jax.tree.leaves(self.adapters.head)
        return *(self.weights[name] for name in self.names), *of_adapters

    def pick(self, arrays: Sequence[jax.Array], adapters: tuple[jax.Array, ...] = ()) -> tuple[jax.Array, ...]:
        """The arrays that the head reads: the model's, in the order of its weights, and adapters' ones."""
        named = dict(zip(self.weights, arrays, strict=True))
        of_adapters = () if self.adapters is None else self.adapters.of_head(adapters)
        return *(named[name] for name in self.names), *of_adapters

    def by_row(self, head: tuple[jax.Array, ...], slots: jax.Array) -> sampling.ByRow:
        """Logits, which come in stretches of the vocabulary, are exchanged so that each device has some rows whole.

        So a device samples its rows as if it were alone, and the logits cross the wire once, each to one device.
        slots: the records of rows, which say whose adapter adds to the logits.
        """
        shapes: dict[str, Any] = dict(self.weights)  # what is read is replaced
        own, of_adapters = head[: len(self.names)], head[len(self.names) :]
        shards, vocabulary = self.options.shards, self.options.spec.vocab_size

        def by_row(hidden: jax.Array, compute: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
            n = hidden.shape[0]
            padded = [_pad_rows(a, -n % shards.size) for a in (hidden, *rows)]
            model = bind(self.graph, shapes | dict(zip(self.names, own, strict=True)))
            if self.adapters is not None:
                self._put_adapters(model, of_adapters, sampling.read_adapters(slots, padded[1]))
            some = shards.exchange(model.logits(padded[0]))[:, :vocabulary]  # [n / tp, V]
            return shards.gather(compute(some, *map(shards.own, padded[1:])))[:n]

        return by_row

    def _put_adapters(self, model: nnx.Module, arrays: tuple[jax.Array, ...], ids: jax.Array) -> None:
        """Has the logits of rows with these adapters add what those say."""
        assert self.adapters is not None and self.adapters.head is not None, "there are slots of the head"
        pool = jax.tree.unflatten(jax.tree.structure(self.adapters.head), arrays)
        counts = {"num_tiles": self.adapters.num_tiles, "slots_per_tile": self.adapters.slots_per_tile}
        (weight,) = [name for name in self.names if weight_of(name) in (HEAD_PART, EMBEDDING)][:1]
        put_adapters(model, {weight_of(weight): pool}, pairs_of(ids, **counts))


def make_sample(head: Head, num_rows: int, options: StepOptions) -> Callable[..., SampleResult]:
    """The function that samples a row bucket's rows; slots and prompts are to be donated."""

    def sample(
        weights: tuple[jax.Array, ...],
        slots: jax.Array,
        prompts: jax.Array,
        masks: jax.Array,
        hidden: jax.Array,
        blob: jax.Array,
    ) -> SampleResult:
        inputs = unpack_sample(blob, num_rows)
        # [R, D]: of each row's last token, of this step or kept from an equal prompt
        last = jnp.where(inputs.source_slots[:, None] > 0, prompts[inputs.source_slots], hidden[inputs.places])
        rows = _sample_rows(head.by_row(weights, slots), last, slots, masks, inputs, options)
        tokens = jnp.maximum(rows[:, 0], 0)  # the step in flight reads one after NOT_FINITE too
        slots = sampling.append_tokens(slots, inputs.slots, inputs.positions, tokens, inputs.samples > 0)
        return slots, _keep_states(prompts, last, rows, inputs), rows, last

    return sample


def make_score(head: Head, *, every: bool) -> Callable[..., tuple[jax.Array]]:
    """The log-probabilities of a tile of prompt tokens: [SCORE_TILE, SCORE_WORDS]; padding is of the first token.

    every: over the whole vocabulary, [SCORE_TILE, 1 + V].
    """

    def score(weights: tuple[jax.Array, ...], slots: jax.Array, hidden: jax.Array, blob: jax.Array) -> tuple[jax.Array]:
        inputs = unpack_score(blob, SCORE_TILE)

        def result(
            logits: jax.Array, row_slots: jax.Array, positions: jax.Array, following: jax.Array, named: jax.Array
        ) -> jax.Array:
            marked = sampling.finite_or_marked(logits, following)
            if every:
                return sampling.all_results(logits, marked)
            of = sampling.reported(logits, slots, row_slots, positions)
            own = sampling.row_results(lambda: of, marked, wanted=jnp.bool_(True), tops_wanted=inputs.tops > 0)
            return jnp.concatenate([own, sampling.named_results(of, named, wanted=inputs.names > 0)], axis=1)

        rows = inputs.slots, inputs.positions, inputs.following, inputs.named
        return (head.by_row(weights, slots)(hidden[inputs.places], result, *rows),)

    return score


def trace_sample(head: Head, pools: Pools, bucket: RowBucket, options: StepOptions, mesh: Mesh) -> jax.stages.Traced:
    """The traced function that samples a row bucket's rows on a mesh. Slots and prompts are donated."""
    sample = make_sample(head, bucket.num_rows, options)
    blob = on_mesh(mesh, (sample_words(bucket.num_rows),), jnp.int32, "words")
    arguments = (head.shapes, pools.slots, pools.prompts, pools.masks, pools.hidden, blob)
    results = results_of(bucket, pools, options, mesh)
    return trace_part(sample, arguments, results, pools=(1, 2), mesh=mesh, options=options)


def make_launch(head: Head, bucket: LaunchBucket, pools: Pools, num_shards: int) -> Callable[..., tuple[Any, ...]]:
    """The step in a bucket; kv, slots and hidden are to be donated."""
    options = head.options
    forward = make_forward(head.graph, tuple(head.weights), bucket.forward, pools, options)
    head = dataclasses.replace(head, adapters=None)  # no row of such a step names one

    def launch(
        weights: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],
        slots: jax.Array,
        hidden: jax.Array,
        blob: jax.Array,
    ) -> tuple[Any, ...]:
        def turn(kv: Any, slots: jax.Array, hidden: jax.Array, inputs: ForwardInputs) -> tuple[Any, ...]:
            kv, hidden, *experts = forward(weights, kv, slots, hidden, inputs)
            last = hidden[jnp.maximum(jnp.cumsum(inputs.counts) - 1, 0)]
            positions, active = inputs.starts + inputs.counts, inputs.samples > 0

            def draw(logits: jax.Array, *rows: jax.Array) -> jax.Array:
                return sampling.drawn(logits, slots, *rows, draw=bucket.draw)

            rows = head.by_row(head.pick(weights), slots)(last, draw, inputs.slots, positions, active)
            slots = sampling.append_tokens(slots, inputs.slots, positions, jnp.maximum(rows[:, 0], 0), active)
            return kv, slots, hidden, rows, *experts

        inputs = unpack_forward(blob, bucket.forward, len(options.spec.kv_groups))
        if bucket.horizon == 1:
            return turn(kv, slots, hidden, inputs)
        return _in_turns(turn, (kv, slots, hidden), inputs, bucket.horizon, num_shards)

    return launch


def _in_turns(
    turn: Callable[..., tuple[Any, ...]], pools: tuple[Any, ...], inputs: ForwardInputs, horizon: int, num_shards: int
) -> tuple[Any, ...]:
    """The pools and draws of turns, which data shards take together; a row that has ended is one of padding."""

    def goes_on(state: tuple[Any, ...]) -> jax.Array:
        left = jnp.max(state[1])
        return (left if num_shards == 1 else jax.lax.pmax(left, DATA)) > 0

    def next_turn(state: tuple[Any, ...]) -> tuple[Any, ...]:
        index, left, pools, drawn = state
        active = jnp.minimum(left, 1)
        own = dataclasses.replace(inputs, starts=inputs.starts + index, counts=active, samples=active)
        *pools, rows = turn(*pools, own)
        drawn = jax.lax.dynamic_update_slice(drawn, rows[:, None], (0, index, 0))
        has_ended = (rows[:, 0] < 0) | sampling.are_stops(rows[:, 0], pools[1], inputs.slots)
        return index + 1, jnp.where(has_ended, 0, left - active), tuple(pools), drawn

    drawn = jnp.zeros((len(inputs.counts), horizon, sampling.RESULT_WORDS), jnp.int32)
    _, _, pools, drawn = jax.lax.while_loop(goes_on, next_turn, (jnp.int32(0), inputs.counts, pools, drawn))
    return *pools, drawn.reshape(-1, drawn.shape[2])


def trace_launch(head: Head, pools: Pools, bucket: LaunchBucket, mesh: Mesh) -> jax.stages.Traced:
    """The step in a bucket on a mesh, ready to be lowered. kv, slots and hidden are donated."""
    options, weights = head.options, tuple(head.weights.values())
    words = on_mesh(mesh, (forward_words(bucket.forward, len(options.spec.kv_groups)),), jnp.int32, "words")
    arguments = (weights, pools.flat_caches(), pools.slots, pools.hidden, words)
    results = results_of(bucket, pools, options, mesh)
    launch = make_launch(head, bucket, pools, mesh.shape[DATA])
    return trace_part(launch, arguments, results, pools=(1, 2, 3), mesh=mesh, options=options, decodes=True)


def trace_score(
    head: Head, pools: Pools, options: StepOptions, mesh: Mesh, *, every: bool = False
) -> jax.stages.Traced:
    """The log-probabilities of a tile of prompt tokens of each data shard on a mesh, ready to be lowered.

    every: over the whole vocabulary.
    """
    blob = on_mesh(mesh, (score_words(SCORE_TILE),), jnp.int32, "words")
    arguments = (head.shapes, pools.slots, pools.hidden, blob)
    words = 1 + options.spec.vocab_size if every else sampling.SCORE_WORDS
    results = (result(mesh, (SCORE_TILE, words), jnp.int32, "tokens"),)
    score = make_score(head, every=every)
    return trace_part(score, arguments, results, pools=(), mesh=mesh, options=options, keeps=False)


def trace_write_slot(pools: Pools, mesh: Mesh) -> jax.stages.Traced:
    """The write of a record into a slot of one data shard, to be lowered; others have a slot beyond their pool."""

    def write(slots: jax.Array, slot: jax.Array, record: jax.Array) -> jax.Array:
        return sampling.write_slot(slots, slot[0], record)

    record = on_mesh(mesh, pools.slots.shape[1:], jnp.int32, None)
    return trace_update(write, (pools.slots, on_mesh(mesh, (1,), jnp.int32, "slots"), record), mesh)


def trace_write_drafts(pools: Pools, mesh: Mesh) -> jax.stages.Traced:
    """The write of drafted tokens of each data shard into their row slots, to be lowered; the slots are donated."""

    def write(slots: jax.Array, blob: jax.Array) -> jax.Array:
        rows, positions, token_ids = blob.reshape(3, -1)
        return sampling.append_tokens(slots, rows, positions, token_ids, rows < slots.shape[0])

    blob = on_mesh(mesh, (3 * most_drafts(pools, mesh.shape[DATA]),), jnp.int32, "words")
    return trace_update(write, (pools.slots, blob), mesh)


def most_drafts(pools: Pools, num_shards: int) -> int:
    """Drafted tokens of a step of one data shard, at most: each has a place, whose mask may be its own."""
    return pools.masks.shape[0] // num_shards


def trace_write_masks(pools: Pools, mesh: Mesh) -> jax.stages.Traced:
    """The write of masks of each data shard, to be lowered; the pool is donated."""
    rows = on_mesh(mesh, (MASKS_AT_ONCE, pools.masks.shape[1]), jnp.int32, "slots", None)
    arguments = (pools.masks, on_mesh(mesh, (MASKS_AT_ONCE,), jnp.int32, "slots"), rows)
    return trace_update(sampling.write_masks, arguments, mesh)


def _pad_rows(a: jax.Array, count: int) -> jax.Array:
    return jnp.pad(a, ((0, count), *((0, 0),) * (a.ndim - 1)))


def _keep_states(prompts: jax.Array, last: jax.Array, rows: jax.Array, inputs: SampleInputs) -> jax.Array:
    """The prompt slots with the states of the rows that have a target.

    XLA writes in place only what is written after every read, and it orders by data alone: so the slot depends on
    `rows`, which were drawn from what was read. No token is below NOT_FINITE, -1.
    """
    after_rows = jnp.minimum(jnp.min(rows[:, 0]) + 1, 0)
    targets = jnp.where(inputs.target_slots > 0, inputs.target_slots + after_rows, len(prompts))
    return prompts.at[targets].set(last, mode="drop")


def _sample_rows(
    by_row: sampling.ByRow,
    states: jax.Array,
    slots: jax.Array,
    masks: jax.Array,
    inputs: SampleInputs,
    options: StepOptions,
) -> jax.Array:
    """[R, words] of states [R, D]: all rows at once; in invariant mode by tiles of one shape, of rows that exist."""
    active = inputs.samples > 0

    def draw(logits: jax.Array, *rows: jax.Array) -> jax.Array:
        sampled = _sample(logits, slots, *rows, masks, gives_masks=options.gives_masks)
        return jnp.concatenate([sampled.result, *([] if sampled.drawable is None else [sampled.drawable])], axis=1)

    if not options.invariant:
        return by_row(states, draw, inputs.slots, inputs.positions, active, inputs.mask_ids)
    R, tile = len(active), invariance.MIN_ROWS
    padded = -R % tile  # the last tile must not reach back into rows already done
    whole = [_pad_rows(a, padded) for a in (states, inputs.slots, inputs.positions, active, inputs.mask_ids)]

    def one_tile(i: jax.Array, rows: jax.Array) -> jax.Array:
        part = [jax.lax.dynamic_slice_in_dim(a, i * tile, tile) for a in whole]
        return jax.lax.dynamic_update_slice_in_dim(rows, by_row(part[0], draw, *part[1:]), i * tile, 0)

    width = sampling.RESULT_WORDS + (masks.shape[1] if options.gives_masks else 0)
    words = jnp.zeros((R + padded, width), jnp.int32)
    return jax.lax.fori_loop(0, -(-inputs.num_rows // tile), one_tile, words)[:R]
