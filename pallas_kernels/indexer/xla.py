"""Choosing keys in plain XLA: one query tile after the other.

The scores of a tile's queries over the row's context stand in one buffer, as integers that are ordered like them. The
k-th largest is found bit by bit, from the highest, by counting; what is above it is chosen, and the earliest of those
equal to it. Nothing is sorted, and every loop runs over the context that is there. Keys that are chosen together have
one place in the buffer; heads that choose for themselves are queries of their own there.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chosen_keys import ChosenKeys, padded_to_pieces
from pallas_kernels.kv_pool import KVPool, index_values
from pallas_kernels.paged_attention.schedule import QueryTiles, Schedule

_TILE = 512  # keys that are scored at once
_TILES_COUNTED = 8  # tiles of scores that are counted at once
_ALWAYS = np.uint32(0xFFFFFFFE)  # above every score, and not the last number, for one is added to it


class _Sizes(NamedTuple):
    """tile: keys that are scored at once. group: keys that are chosen together. local: groups that always are."""

    tile: int
    group: int
    local: int


def choose(
    q: jax.Array,
    weights: jax.Array | None,
    pool: KVPool,
    schedule: Schedule,
    *,
    top_k: int,
    group: int = 1,
    local: int = 0,
) -> ChosenKeys:
    """See the package's choose_keys."""
    least = math.lcm(schedule.step.block_size, group)
    tile = _TILE // least * least or least
    reach = schedule.block_tables.shape[1] * schedule.step.block_size
    counted = min(_TILES_COUNTED, -(-reach // tile)) * tile
    width = -(-reach // counted) * counted // group
    S = 1 if weights is not None else q.shape[1]
    places = jnp.zeros((len(q), S, padded_to_pieces(top_k)), jnp.int32)
    for queries in schedule.passes:

        def one_tile(
            i: jax.Array, state: tuple[jax.Array, jax.Array], queries: QueryTiles = queries
        ) -> tuple[jax.Array, jax.Array]:
            def chosen(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                places, scores = state
                scores = _score(q, weights, pool, schedule, queries, i, scores, _Sizes(tile, group, local))
                end = queries.high[i] // group + 1
                best, scores = _best(scores, end, top_k // group, tile // group, counted // group)
                table, C = schedule.block_tables[queries.tiles.runs[i]], schedule.step.block_size
                at = (jnp.maximum(best, 0)[..., None] * group + jnp.arange(group)[None, None]).reshape(-1, S, top_k)
                is_there = jnp.repeat(best >= 0, group, axis=1).reshape(at.shape)
                is_there &= at <= _positions(queries, i)[:, None, None]
                found = jnp.where(is_there, table.at[at // C].get(mode="clip") * C + at % C, 0)
                found = jnp.pad(found, ((0, 0), (0, 0), (0, places.shape[2] - top_k)))
                return queries.tiles.store(places, found, i), scores

            return jax.lax.cond(schedule.chooses(queries, i, top_k), chosen, lambda state: state, state)

        scores = jnp.zeros((queries.tiles.tile * S, width), jnp.uint32)
        places, _ = jax.lax.fori_loop(0, queries.tiles.num_tiles, one_tile, (places, scores))
    return ChosenKeys(places=places, top_k=top_k)


def _positions(queries: QueryTiles, i: jax.Array) -> jax.Array:  # [Q]
    """Positions of the lanes of tile i."""
    return queries.low[i] - queries.tiles.first_lanes[i] + jnp.arange(queries.tiles.tile)


def _score(
    q: jax.Array,
    weights: jax.Array | None,
    pool: KVPool,
    schedule: Schedule,
    queries: QueryTiles,
    i: jax.Array,
    scores: jax.Array,  # [Q * S, width] uint32
    sizes: _Sizes,
) -> jax.Array:
    """The buffer with the scores of tile i, 0 for what a query does not see."""
    tile, group, local = sizes
    tiles, C, positions = queries.tiles, schedule.step.block_size, _positions(queries, i)
    heads = tiles.load(q, i).astype(jnp.float32)  # [Q, J, I]
    weighed = None if weights is None else tiles.load(weights, i).astype(jnp.float32)  # [Q, J]
    table, (P, _, _, width) = schedule.block_tables[tiles.runs[i]], pool.index_keys.shape
    flat = pool.index_keys.reshape(P, C, width)

    def one(j: jax.Array, scores: jax.Array) -> jax.Array:
        ids = table.at[j * (tile // C) + jnp.arange(tile // C)].get(mode="clip")
        keys = index_values(flat[ids].reshape(tile, width), pool).astype(jnp.float32)
        found = jnp.einsum("qji,si->qjs", heads, keys)
        if weighed is not None:
            found = jnp.einsum("qjs,qj->qs", jax.nn.relu(found), weighed)[:, None]
        seen = j * tile + jnp.arange(tile)[None, None] <= positions[:, None, None]
        found = jnp.where(seen, _ordered(found), 0).reshape(*found.shape[:2], tile // group, group).max(axis=-1)
        if local:
            own = positions[:, None, None] // group
            at = j * (tile // group) + jnp.arange(tile // group)[None, None]
            found = jnp.where((at > own - local) & (at <= own), _ALWAYS, found)
        return jax.lax.dynamic_update_slice_in_dim(scores, found.reshape(len(scores), -1), j * (tile // group), axis=1)

    return jax.lax.fori_loop(0, queries.high[i] // tile + 1, one, scores)


def _ordered(scores: jax.Array) -> jax.Array:
    """Integers above 0 that are ordered like these float32. Both zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _best(
    scores: jax.Array, end: jax.Array, top_k: int, tile: int, counted: int
) -> tuple[jax.Array, jax.Array]:  # [Q, top_k] int32, the buffer
    """The positions of the top_k largest before `end`, in ascending order, -1 where there are fewer.

    The buffer is given back with other contents.
    """
    Q, width = scores.shape
    num_counted, num_tiles = -(-end // counted), -(-end // tile)

    def count(least: jax.Array) -> jax.Array:  # [Q] uint32 -> [Q] int32
        """Scores that are at least this."""

        def one(j: jax.Array, found: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice_in_dim(scores, j * counted, counted, axis=1)
            is_there = j * counted + jnp.arange(counted) < end
            return found + jnp.sum((part >= least[:, None]) & is_there[None], axis=1, dtype=jnp.int32)

        return jax.lax.fori_loop(0, num_counted, one, jnp.zeros(Q, jnp.int32))

    def one_bit(i: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        return jnp.where(count(higher) >= top_k, higher, least)

    least = jax.lax.fori_loop(0, 32, one_bit, jnp.zeros(Q, jnp.uint32))  # the k-th largest; 0 where there are fewer
    above = count(least + 1)

    def rank(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Puts in place of a tile's scores how many are chosen up to each."""
        scores, chosen, equal = state
        part = jax.lax.dynamic_slice_in_dim(scores, j * tile, tile, axis=1)
        is_equal = (part == least[:, None]) & (part > 0)
        equals = jnp.cumsum(is_equal, axis=1, dtype=jnp.int32) + equal[:, None]
        is_chosen = (part > least[:, None]) | (is_equal & (equals <= top_k - above[:, None]))
        is_chosen &= j * tile + jnp.arange(tile)[None] < end
        counts = jnp.cumsum(is_chosen, axis=1, dtype=jnp.int32) + chosen[:, None]
        scores = jax.lax.dynamic_update_slice_in_dim(scores, counts.astype(jnp.uint32), j * tile, axis=1)
        return scores, counts[:, -1], equals[:, -1]

    none = jnp.zeros(Q, jnp.int32)
    scores, total, _ = jax.lax.fori_loop(0, num_tiles, rank, (scores, none, none))
    wanted = jnp.broadcast_to(jnp.arange(1, top_k + 1, dtype=jnp.int32), (Q, top_k))

    def halve(_: jax.Array, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span
        middle = (low + high) // 2
        reached = jnp.take_along_axis(scores, jnp.minimum(middle, width - 1), axis=1).astype(jnp.int32) >= wanted
        return jnp.where(reached, low, middle + 1), jnp.where(reached, middle, high)

    span = jnp.zeros_like(wanted), jnp.full_like(wanted, end)
    found, _ = jax.lax.fori_loop(0, math.ceil(math.log2(width)) + 1, halve, span)
    return jnp.where(wanted <= total[:, None], found, -1), scores
