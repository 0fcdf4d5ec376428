"""Tiles of (token, choice) pairs of one expert each, for kernels that multiply experts.

A pair has a place in the tiles; an expert's pairs begin a tile of their own. The number of tiles that are run is
data, their room is for the worst case: every expert's last tile is nearly empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.stack import ExpertStack
from pallas_kernels.quantized_matmul import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesOfExperts:
    """Where pairs stand. rows: of a tile."""

    num_tiles: jax.Array  # [] int32
    expert_ids: jax.Array  # [tiles] int32
    tokens: jax.Array  # [tiles rows] int32: the token at a place, 0 where none is
    places: jax.Array  # [T, X] int32: of each pair, beyond the last where its expert is elsewhere
    rows: int

    def in_room(self, room: int) -> TilesOfExperts:
        """These tiles with arrays of `room` tiles, where no more are run."""
        return dataclasses.replace(self, expert_ids=self.expert_ids[:room], tokens=self.tokens[: room * self.rows])


def stacks_of(experts: ExpertStack) -> list[jax.Array | QuantizedWeight]:
    """Gate, up and down; kernels take no experts without gates."""
    assert experts.gate is not None, "experts without gates are multiplied in XLA"
    return [experts.gate, experts.up, experts.down]


def mlp_over_tiles(
    x: jax.Array,  # [T, D]
    expert_weights: jax.Array,  # [T, X]
    experts: ExpertStack,
    tiles: TilesOfExperts,
    *,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    product: Callable[[jax.Array, Any, jnp.dtype], jax.Array],
) -> jax.Array:  # [T, D]
    """See the package's expert_mlp.

    product: of [tiles rows, I] with each tile's expert, [tiles, rows, O] in float32, or rounded to the dtype that it is
    given where its kernel can.
    """
    stacks = stacks_of(experts)

    def biased(given: jax.Array, stack: Any, bias: jax.Array | None, dtype: Any) -> jax.Array:
        if bias is None:
            return product(given, stack, dtype)
        return product(given, stack, jnp.dtype("float32")) + bias[tiles.expert_ids][:, None, :].astype(jnp.float32)

    biases = (None, None, None) if experts.biases is None else experts.biases
    rows = x[tiles.tokens]  # [tiles rows, D]
    gate, up = (biased(rows, stack, bias, jnp.float32) for stack, bias in zip(stacks[:2], biases[:2], strict=True))
    hidden = activation(gate, up).astype(x.dtype)
    down = biased(hidden.reshape(-1, hidden.shape[-1]), stacks[2], biases[2], x.dtype).astype(x.dtype)
    outputs, is_here = down.reshape(-1, x.shape[1]), tiles.places < tiles.tokens.shape[0]
    places = jnp.minimum(tiles.places, len(outputs) - 1)  # once: XLA would do it for each choice
    total = jnp.zeros(x.shape, jnp.float32)
    for choice in range(expert_weights.shape[1]):
        chosen = outputs.at[places[:, choice]].get(mode="promise_in_bounds", wrap_negative_indices=False)
        given = jnp.where(is_here[:, choice, None], chosen.astype(jnp.float32), 0.0)
        total += expert_weights[:, choice, None] * given
    return total.astype(x.dtype)


def tiles_of_experts(expert_ids: jax.Array, *, num_here: int, rows: int) -> TilesOfExperts:
    """The tiles of pairs whose expert is here, those with an id below num_here."""
    T, X = expert_ids.shape
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_here).astype(jnp.int32)
    num_tiles = -(-counts // rows)
    ends = jnp.cumsum(num_tiles)
    most = min(T * X, T * X // rows + num_here)
    owners = jnp.searchsorted(ends, jnp.arange(most, dtype=jnp.int32), side="right", method="compare_all")
    sorted_ids = flat[order]
    of = jnp.minimum(sorted_ids, num_here - 1)
    rank = jnp.arange(T * X, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[of]
    in_order = jnp.where(sorted_ids < num_here, (ends - num_tiles)[of] * rows + rank, most * rows).astype(jnp.int32)
    return TilesOfExperts(
        num_tiles=ends[-1].astype(jnp.int32),
        expert_ids=jnp.minimum(owners, num_here - 1).astype(jnp.int32),
        tokens=jnp.zeros((most * rows,), jnp.int32).at[in_order].set(order // X, mode="drop"),
        places=jnp.zeros((T * X,), jnp.int32).at[order].set(in_order).reshape(T, X),
        rows=rows,
    )
