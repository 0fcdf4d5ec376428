"""add_low_rank in plain XLA: a loop over pairs of tiles, each two products; one pair needs no loop."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSlots:
    """Slot s has the `rank` columns from ((s - 1) % n) * rank on in rank tile (s - 1) // n, n = C // rank.

    What a slot does not fill is zero, in the scales too.
    """

    a: jax.Array  # [G, C, I]
    b: jax.Array  # [G, C, O]
    scales: jax.Array  # [G, C] float32
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def slots_per_tile(self) -> int:
        return self.a.shape[1] // self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """Slots of stacked experts; slot s is row s - 1, whole for each expert."""

    a: jax.Array  # [S, E, r, I]
    b: jax.Array  # [S, E, r, O]
    scales: jax.Array  # [S] float32


def add_low_rank(
    y: jax.Array,  # [T, O]
    x: jax.Array,  # [T, I]
    weights: LowRankSlots,
    *,
    slots: jax.Array,  # [T]
    token_tiles: jax.Array,  # [pairs]
    rank_tiles: jax.Array,  # [pairs]
    num_pairs: jax.Array,
    tile: int,
) -> jax.Array:  # [T, O]
    """See the package's add_low_rank."""
    T, n = x.shape[0], weights.slots_per_tile

    def one_pair(p: jax.Array | int, y: jax.Array) -> jax.Array:
        first, group = token_tiles[p] * tile, rank_tiles[p]
        start = jnp.minimum(first, T - tile)  # the last tile lies within the step, and leaves what others own
        rows, own, before = (_tile_of(array, start, tile) for array in (x, slots, y))
        names = jnp.where(start + jnp.arange(tile) >= first, own, 0) - 1  # [tile], -1 for none
        is_named = (names >= 0) & (names // n == group)
        a, b, scales = (_at(array, group) for array in (weights.a, weights.b, weights.scales))
        inner = jnp.einsum("ti,ci->tc", rows, a, preferred_element_type=jnp.float32)
        columns = jnp.arange(a.shape[0]) // weights.rank  # [C], which of the tile's slots
        is_own = is_named[:, None] & (columns[None, :] == (names % n)[:, None])
        inner = jnp.where(is_own, inner * scales[None, :], 0.0).astype(b.dtype)
        delta = jnp.einsum("tc,co->to", inner, b, preferred_element_type=jnp.float32)
        after = jnp.where(is_named[:, None], (before.astype(jnp.float32) + delta).astype(y.dtype), before)
        return after if tile == T else jax.lax.dynamic_update_slice_in_dim(y, after, start, 0)

    if len(token_tiles) == 1:
        return one_pair(0, y)
    return jax.lax.fori_loop(0, num_pairs, one_pair, y)


def _tile_of(array: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Rows from `start` on; all of them without a slice, which XLA would copy."""
    return array if size == array.shape[0] else jax.lax.dynamic_slice_in_dim(array, start, size)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return array[0] if array.shape[0] == 1 else jax.lax.dynamic_index_in_dim(array, index, keepdims=False)
