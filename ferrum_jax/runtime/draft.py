"""The layer that predicts one token more: it runs behind what samples in each step, over all of the step's tokens.

`draft`, one executable for each bucket: (weights, kv, slots, hidden, packed input of the forward, packed places) to
(kv, drafts). kv: the layer's own, donated. The token after each one is read from the row slots, which have the draws of
this step already, and hidden states from the front of `hidden`. `drafts` [places, 1] int32 has the likeliest token
behind the one drawn at each place. They change no text, so they need not be invariant. Tokens of images are embedded as
their placeholder, and turned by the rotary positions of the forward. Adapters add nothing here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ferrum_jax.models.families.registry import bind
from ferrum_jax.models.layers.attention import ForwardContext
from ferrum_jax.models.sharding import on_mesh
from ferrum_jax.runtime import sampling
from ferrum_jax.runtime.buckets import DraftBucket
from ferrum_jax.runtime.handed_back import results_of, trace_part
from ferrum_jax.runtime.inputs import forward_words, place_words, unpack_forward
from ferrum_jax.runtime.layer_calls import LayerCalls
from ferrum_jax.runtime.pools.pools import Pools
from ferrum_jax.runtime.sample import Head
from ferrum_jax.runtime.step import lay_out_tokens, rope_positions, schedules_of
from ferrum_jax.runtime.step_options import StepOptions

# Places whose logits are computed at once: more read the head's weights less often, and fewer leave less padding.
_PLACES_ON_CPU, _PLACES_ON_ACCELERATORS = 16, 256


@dataclasses.dataclass(frozen=True)
class DraftLayer:
    """The first layer behind the last, with embeddings, its ends and the head. head: of the model."""

    head: Head

    @property
    def options(self) -> StepOptions:
        return self.head.options

    @property
    def layer(self) -> int:
        """Its index."""
        return self.options.spec.num_hidden_layers

    @property
    def names(self) -> tuple[str, ...]:
        """The weights that it reads, and few others: all but those of other layers."""
        own = f"layers.{self.layer}."
        return tuple(name for name in self.head.weights if name.startswith(own) or not name.startswith("layers."))

    @property
    def shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(self.head.weights[name] for name in self.names)

    def pick(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """The arrays that the layer reads, in the order of its weights."""
        named = dict(zip(self.head.weights, arrays, strict=True))
        return tuple(named[name] for name in self.names)

    def span(self, pools: Pools) -> slice:
        """Where its arrays are among `Pools.flat_caches`."""
        first = len(jax.tree.leaves(pools.kv[: self.layer]))
        return slice(first, first + len(jax.tree.leaves(pools.kv[self.layer])))


def make_draft(layer: DraftLayer, bucket: DraftBucket, pools: Pools) -> Callable[..., tuple[Any, ...]]:
    """The layer in a bucket; kv is to be donated."""
    options, index = layer.options, layer.layer
    spec, tree = options.spec, jax.tree.structure(pools.kv[index])
    tile = _PLACES_ON_CPU if options.target.platform == "cpu" else _PLACES_ON_ACCELERATORS
    head = dataclasses.replace(layer.head, adapters=None)
    shapes: dict[str, Any] = dict(head.weights)  # what is read is replaced

    def draft(
        weights: tuple[jax.Array, ...],
        kv: tuple[jax.Array, ...],
        slots: jax.Array,
        hidden: jax.Array,
        blob: jax.Array,
        places: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        named = dict(zip(layer.names, weights, strict=True))
        model, forward = bind(head.graph, shapes | named), bucket.forward
        inputs = unpack_forward(blob, forward, len(spec.kv_groups))
        tokens = lay_out_tokens(inputs, forward.num_tokens)
        pool = jax.tree.unflatten(tree, kv)
        calls = LayerCalls(
            options,
            [pool if i == index else None for i in range(spec.num_layers)],
            [()] * spec.num_layers,
            schedules_of({index: pool}, inputs, tokens, forward, options),
            None,
            tokens.are_real,
        )
        following = sampling.read_tokens(slots, tokens.slots, tokens.positions + 1)
        context = ForwardContext(run=calls, shards=options.shards)
        states = hidden[: forward.num_tokens]
        drafted = model.draft(following, states, rope_positions(inputs, tokens, options), context)  # [T, D]
        by_row = head.by_row(tuple(named[name] for name in head.names), slots)
        found = _likeliest(by_row, drafted[places[1:]], places[0], tile)
        return tuple(jax.tree.leaves(calls.pools[index])), found

    return draft


def _likeliest(by_row: sampling.ByRow, states: jax.Array, count: jax.Array, tile: int) -> jax.Array:
    """[places, 1] int32 of states [places, D]: the token with the largest logit, by tiles of places that exist."""

    def largest(logits: jax.Array) -> jax.Array:
        return jnp.argmax(logits, axis=1).astype(jnp.int32)[:, None]

    num_places = len(states)
    if num_places <= tile:
        return by_row(states, largest)
    whole = jnp.pad(states, ((0, -num_places % tile), (0, 0)))

    def one_tile(i: jax.Array, found: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(whole, i * tile, tile)
        return jax.lax.dynamic_update_slice_in_dim(found, by_row(part, largest), i * tile, 0)

    found = jnp.zeros((len(whole), 1), jnp.int32)
    return jax.lax.fori_loop(0, -(-count // tile), one_tile, found)[:num_places]


def trace_draft(layer: DraftLayer, pools: Pools, bucket: DraftBucket, mesh: Mesh) -> jax.stages.Traced:
    """The layer in a bucket on a mesh, ready to be lowered: each device runs it on its own parts. kv is donated."""
    options, kv = layer.options, tuple(jax.tree.leaves(pools.kv[layer.layer]))
    words = on_mesh(mesh, (forward_words(bucket.forward, len(options.spec.kv_groups)),), jnp.int32, "words")
    places = on_mesh(mesh, (place_words(bucket.num_places),), jnp.int32, "words")
    arguments = (layer.shapes, kv, pools.slots, pools.hidden, words, places)
    results = results_of(bucket, pools, options, mesh)
    return trace_part(make_draft(layer, bucket, pools), arguments, results, pools=(1,), mesh=mesh, options=options)
