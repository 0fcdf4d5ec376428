"""Cutting ragged runs of neighbouring items into tiles of one size.

Run r holds counts[r] neighbours of a flat array, runs stand in order. A tile is a slice of the flat array that
serves one run and always lies inside the array: where a run ends early, or the slice was moved back to fit, its
other lanes belong to neighbours and the caller masks them.

    items    a a a a a b b c . .      runs a, b, c and padding
    tiles    [a a a a]                tile = 4
                     [a|b b c]
                       [b b|c .]
                           [. c . .]  moved back to fit: one lane before c
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

static = functools.partial(dataclasses.field, metadata={"static": True})  # a pytree dataclass's compile-time field


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles in the order of their runs. Entries from num_tiles on must not be run."""

    num_tiles: jax.Array  # [] int32
    runs: jax.Array  # [tiles] int32, the run that the tile serves
    done: jax.Array  # [tiles] int32, items of the run that stand in its earlier tiles
    first_items: jax.Array  # [tiles] int32, flat index of lane 0
    first_lanes: jax.Array  # [tiles] int32, lanes first .. end - 1 are the run's
    end_lanes: jax.Array  # [tiles] int32
    tile: int = static()

    def owns(self, i: jax.Array) -> jax.Array:  # [tile] bool
        """Which lanes of tile i are its run's."""
        lane = jnp.arange(self.tile)
        return (lane >= self.first_lanes[i]) & (lane < self.end_lanes[i])

    def load(self, items: jax.Array, i: jax.Array) -> jax.Array:  # [items, ...] -> [tile, ...]
        """The lanes of tile i."""
        return jax.lax.dynamic_slice_in_dim(items, self.first_items[i], self.tile)

    def store(self, items: jax.Array, lanes: jax.Array, i: jax.Array) -> jax.Array:  # items: [items, ...]
        """`items` with the lanes that tile i owns written; in place inside a loop."""
        if self.tile > 1:
            own = self.owns(i).reshape(self.tile, *(1,) * (items.ndim - 1))
            lanes = jnp.where(own, lanes, self.load(items, i))
        return jax.lax.dynamic_update_slice_in_dim(items, lanes, self.first_items[i], 0)

    def store_several(self, items: jax.Array, lanes: jax.Array, places: jax.Array) -> jax.Array:  # items: [items, ...]
        """As `store` for the tiles at `places` [n] with `lanes` [n, tile, ...]; none for places from num_tiles on."""
        tiles = jnp.minimum(places, self.num_tiles - 1)
        own = jax.vmap(self.owns)(tiles) & (places < self.num_tiles)[:, None]
        at = jnp.where(own, self.first_items[tiles][:, None] + jnp.arange(self.tile)[None], len(items))
        return items.at[at.reshape(-1)].set(lanes.reshape(-1, *items.shape[1:]), mode="drop")


def cut(
    counts: jax.Array,  # [runs] int32
    offsets: jax.Array,  # [runs] int32, flat index of each run's first item
    *,
    tile: int,
    num_items: int,
) -> Tiles:
    """The tiles of runs in an array of num_items; tile is at most num_items, else ValueError."""
    if tile > num_items:
        raise ValueError(f"tile is {tile}; with {num_items} items it must be at most {num_items}")
    runs = counts.shape[0]
    num_tiles = -(-counts // tile)  # [runs]
    ends = jnp.cumsum(num_tiles)
    i = jnp.arange(min(num_items, num_items // tile + runs), dtype=jnp.int32)
    of = jnp.minimum(jnp.searchsorted(ends, i, side="right", method="compare_all"), runs - 1).astype(jnp.int32)
    done = (i - (ends - num_tiles)[of]) * tile
    first = offsets[of] + done
    first_items = jnp.minimum(first, num_items - tile)
    first_lanes = first - first_items
    return Tiles(
        num_tiles=ends[-1].astype(jnp.int32),
        runs=of,
        done=done,
        first_items=first_items,
        first_lanes=first_lanes,
        end_lanes=first_lanes + jnp.clip(counts[of] - done, 0, tile),
        tile=tile,
    )
