"""expert_mlp in plain XLA: (token, choice) pairs sorted by expert, a loop over tiles of one expert each.

The trip count is data: cost follows the routed tokens, not the number of experts. A token's result is the sum of
its choices in their own order, so that it does not depend on where sorting put its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.low_rank import ExpertSlots
from pallas_kernels.quantized_matmul import QuantizedWeight, quantized_matmul
from pallas_kernels.ragged import cut


def ids_here(expert_ids: jax.Array, first_expert: jax.Array | int, num_here: int) -> jax.Array:
    """Ids counted from the first expert that is here; num_here for those that are elsewhere."""
    ids = expert_ids - first_expert
    return jnp.where((ids >= 0) & (ids < num_here), ids, num_here)


def expert_mlp(
    x: jax.Array,  # [T, D]
    expert_ids: jax.Array,  # [T, X], E for no expert
    expert_weights: jax.Array,  # [T, X]
    experts: ExpertStack,
    *,
    tile: int,
    activation: Callable[..., jax.Array],
) -> jax.Array:  # [T, D]
    """See the package's expert_mlp."""
    (T, X), gate, up, down = expert_ids.shape, experts.gate, experts.up, experts.down
    gate_bias, up_bias, down_bias = (None, None, None) if experts.biases is None else experts.biases
    adapters, kinds = experts.adapters, 1
    flat = expert_ids.reshape(-1)
    if adapters is not None:  # a tile is of one expert and one adapter
        kinds = adapters.num_slots + 1
        flat = flat * kinds + jnp.repeat(adapters.slots, X)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # [T * X] pairs, by expert
    # no expert stands last and is not counted
    counts = jnp.bincount(flat, length=up.shape[0] * kinds).astype(jnp.int32)
    tiles = cut(counts, jnp.cumsum(counts) - counts, tile=tile, num_items=T * X)

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        expert, slot = tiles.runs[i] // kinds, tiles.runs[i] % kinds
        rows = x[tiles.load(order, i) // X]  # [tile, D]

        def product(rows: jax.Array, weights: Any, biases: Any, which: str) -> jax.Array:
            out = _project(rows, weights, biases, expert)
            return out if adapters is None else _add_low_rank(out, rows, getattr(adapters, which), expert, slot)

        gates = () if gate is None else (product(rows, gate, gate_bias, "gate"),)
        hidden = activation(*gates, product(rows, up, up_bias, "up"))
        given = product(hidden.astype(x.dtype), down, down_bias, "down")
        return tiles.store(out, given.astype(x.dtype), i)

    outputs = jax.lax.fori_loop(0, tiles.num_tiles, one_tile, jnp.zeros((T * X, x.shape[1]), x.dtype))
    places = jnp.argsort(order).reshape(T, X)  # where the pair of each choice stands in `outputs`
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(X):
        total += expert_weights[:, choice, None] * outputs[places[:, choice]].astype(jnp.float32)
    return total.astype(x.dtype)


def _project(
    rows: jax.Array,  # [tile, in]
    weights: jax.Array | QuantizedWeight,  # [E, out, in]
    biases: jax.Array | None,  # [E, out]
    expert: jax.Array,
) -> jax.Array:  # [tile, out] float32
    """rows @ weights[expert].T + biases[expert]."""
    if isinstance(weights, QuantizedWeight):
        out = quantized_matmul(rows, weights.at(expert), out_dtype=jnp.float32, implementation="xla")
    else:
        weight = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        out = jnp.einsum("ti,oi->to", rows, weight, preferred_element_type=jnp.float32)
    if biases is not None:
        out += jax.lax.dynamic_index_in_dim(biases, expert).astype(jnp.float32)
    return out


def _add_low_rank(
    out: jax.Array,  # [tile, out] float32
    rows: jax.Array,  # [tile, in]
    slots: ExpertSlots,
    expert: jax.Array,
    slot: jax.Array,
) -> jax.Array:  # [tile, out] float32
    """Adds the product of a slot's adapter to all rows of a tile; slot 0 adds nothing."""
    row = jnp.maximum(slot - 1, 0)
    a, b = (array[row, expert] for array in (slots.a, slots.b))
    inner = jnp.einsum("ti,ri->tr", rows, a, preferred_element_type=jnp.float32) * slots.scales[row]
    delta = jnp.einsum("tr,ro->to", inner.astype(b.dtype), b, preferred_element_type=jnp.float32)
    return jnp.where(slot > 0, out + delta, out)
