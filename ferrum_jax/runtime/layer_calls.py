"""The layers of a step: one traced function for all that are alike.

Layers are alike when their structure, sizes and pools are: the calls of such layers are calls of one function, which is
traced and lowered once. What XLA makes of the calls is decided where the step is compiled (`compile/pieces.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from ferrum_jax.inputs.sizes import invariance
from ferrum_jax.models.families.registry import bind, unbind
from ferrum_jax.models.layers.adapted_weight import put_adapters
from ferrum_jax.models.layers.attention import KeysAndValues, LayerArguments, LayerContext
from ferrum_jax.models.sharding.shards import Shards
from ferrum_jax.runtime.step_options import StepOptions
from pallas_kernels.chosen_keys import Chosen
from pallas_kernels.indexer import IndexerSchedule, choose_keys
from pallas_kernels.kv_pool import KVPool, vectors_at
from pallas_kernels.low_rank import ExpertSlots, LowRankSlots, Pairs
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.state_rows import StateRows

# Traced once for all kinds of layers and, where shapes agree, for all buckets; XLA inlines the calls.
_attend = jax.jit(paged_attention, static_argnames=("scale", "soft_cap", "implementation"))
_choose = jax.jit(choose_keys, static_argnames=("implementation",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSchedule:
    """A layer's attention in a step: its implementation, its schedule, and its indexer's schedule."""

    implementation: str | None = None
    attention: Any = None
    indexer: IndexerSchedule | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipSchedule:
    """A layer's attention to clips in a step. Each token is behind all positions of its clip.

    attention: of tokens that are each a row of its own, whose last position is the clip's. A kernel writes what it
    computes there, so it is given what is there: in `blocks` [T] int32, at `offset`.
    """

    attention: Any
    blocks: jax.Array
    offset: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerKind:
    """All that decides a layer's program beside the shapes of its arguments."""

    graph: nnx.GraphDef
    implementation: str | None  # of attention
    recurrence: str  # the implementation of one
    gives_experts: bool
    expert_tile: int | None
    shards: Shards
    expert_shards: Shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayerOperands:
    """A layer's operands beside its weights, its caches and the residual."""

    beside: LayerArguments
    schedule: Any
    rows: StateRows | None
    is_token: jax.Array
    borrowed: KeysAndValues | None
    index_schedule: IndexerSchedule | None
    chosen: Chosen | None
    adapters: dict[str, LowRankSlots | ExpertSlots]
    pairs: Pairs | None


def run_layer(
    kind: _LayerKind,
    weights: Mapping[str, jax.Array],
    pool: KVPool | None,
    state: Any,
    x: jax.Array,  # [T, D]
    given: _LayerOperands,
) -> tuple[jax.Array, KVPool | None, Any, KeysAndValues | None, Chosen | None, jax.Array | None]:
    """(x, pool, state) after the layer, what it lends, the keys chosen last, and its tokens' experts if asked for.

    pool: of the layer's keys and values, or of its lender's, which are written again where they are.
    """
    caches = {"pool": pool, "state": state}
    layer = bind(kind.graph, weights)
    if given.pairs is not None:
        put_adapters(layer, given.adapters, given.pairs)
    context = _context_of(kind, given, caches)
    x = layer(x, given.beside, context)
    beside = context.lent, context.chosen, context.routed if kind.gives_experts else None
    return x, caches["pool"], caches["state"], *beside


def _context_of(kind: _LayerKind, given: _LayerOperands, caches: dict[str, Any]) -> LayerContext:
    """The surroundings of a layer, which put its pool and state after the layer in place of those before."""

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        chunked: bool = False,
        is_latent: bool = False,
        **how: Any,
    ) -> jax.Array:
        schedule, pool = given.schedule, caches["pool"]
        assert schedule.step.window == window, f"a layer has window {window}, its cache group {schedule.step.window}"
        assert chunked == schedule.step.chunked, "a layer and its schedule see other positions"
        assert pool.is_latent == is_latent, "a layer and its pool do not keep alike"
        out, caches["pool"] = _attend(q, k, v, pool, schedule, implementation=kind.implementation, **how)
        return out

    def across(q: jax.Array, *, scale: float) -> jax.Array:
        clips, pool = given.schedule, caches["pool"]
        k, v = (x.astype(q.dtype) for x in vectors_at(pool, clips.blocks, clips.offset))
        out, caches["pool"] = _attend(q, k, v, pool, clips.attention, scale=scale, implementation=kind.implementation)
        return out

    def choose(
        q: jax.Array, weights: jax.Array | None, key: jax.Array, *, top_k: int, group: int = 1, local: int = 0
    ) -> Chosen | None:
        schedule, asked = given.index_schedule, (top_k, group, local)
        assert schedule is not None, "a layer has an indexer, and no schedule for it"
        theirs = schedule.top_k, schedule.group, schedule.local
        assert theirs == asked, f"a layer chooses {asked} (keys, in groups, always), its schedule {theirs}"
        chosen, caches["pool"] = _choose(q, weights, key, caches["pool"], schedule, implementation=kind.implementation)
        return chosen

    def recur(shapes: Any, compute: Callable[[Any, StateRows], tuple[jax.Array, Any]], num_tokens: int) -> jax.Array:
        kept = [(array.shape[1:], array.dtype) for array in jax.tree.leaves(caches["state"])]
        asked = [(state.shape, state.dtype) for state in jax.tree.leaves(shapes)]
        assert kept == asked and given.rows is not None, f"a layer has states {asked}, its pool {kept}"
        out, caches["state"] = compute(caches["state"], given.rows)
        return out

    return LayerContext(
        attend=attend,
        across=across,
        choose=choose,
        recur=recur,
        expert_tile=kind.expert_tile,
        implementation=kind.recurrence,
        shards=kind.shards,
        expert_shards=kind.expert_shards,
        is_token=given.is_token,
        borrowed=given.borrowed,
        chosen=given.chosen,
    )


_run_layer = jax.jit(run_layer, static_argnums=0)


class LayerCalls:
    """The layers of one step, called one after the other; afterwards their caches are in `pools` and `states`, and in
    `routed` the experts of their tokens, [T, X] of each layer that has experts.

    schedules: by layer, what its attention needs of the step. rows: of recurrent layers. adapters: slots
    by the name of the weight, and pairs which tokens name them; None in a step without.
    """

    def __init__(
        self,
        options: StepOptions,
        pools: Sequence[KVPool | None],
        states: Sequence[Any],
        schedules: Mapping[int, LayerSchedule],
        rows: StateRows | None,
        is_token: jax.Array,
        adapters: tuple[Mapping[str, LowRankSlots | ExpertSlots], Pairs] | None = None,
    ) -> None:
        self.pools, self.states = list(pools), list(states)
        self.routed: list[jax.Array] = []
        self._options, self._schedules, self._rows, self._is_token = options, schedules, rows, is_token
        self._adapters, self._pairs = ({}, None) if adapters is None else adapters
        self._lent: dict[int, KeysAndValues] = {}
        self._chosen: Chosen | None = None

    def __call__(self, index: int, layer: nnx.Module, x: jax.Array, beside: LayerArguments) -> jax.Array:
        options, lender = self._options, self._options.spec.lender_of(index)
        own = self._schedules.get(lender, LayerSchedule())
        graph, weights = unbind(layer)
        kind = _LayerKind(
            graph=graph,
            implementation=own.implementation,
            recurrence=options.recurrence,
            gives_experts=options.gives_experts,
            expert_tile=invariance.EXPERT_TILE if options.invariant else None,
            shards=options.shards,
            expert_shards=options.expert_shards,
        )
        given = _LayerOperands(
            beside=beside,
            schedule=own.attention,
            rows=self._rows if jax.tree.leaves(self.states[index]) else None,
            is_token=self._is_token,
            borrowed=self._lent.get(lender) if lender != index else None,
            index_schedule=own.indexer,
            chosen=self._chosen,
            adapters=self._adapters_of(index),
            pairs=self._pairs,
        )
        x, self.pools[lender], self.states[index], lent, self._chosen, routed = _run_layer(
            kind, weights, self.pools[lender], self.states[index], x, given
        )
        if lent is not None:
            self._lent[index] = lent
        if routed is not None:
            self.routed.append(routed)
        return x

    def _adapters_of(self, index: int) -> dict[str, LowRankSlots | ExpertSlots]:
        """The slots of a layer's weights, by their names in the layer."""
        prefix = f"layers.{index}."
        return {name.removeprefix(prefix): own for name, own in self._adapters.items() if name.startswith(prefix)}
