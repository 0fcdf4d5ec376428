"""Paged attention in plain XLA: one query tile after the other, on GPUs several side by side, each over the KV tiles of
its own context.

K and V of a tile are gathered to [K, tile_kv, H or V], the layout in which the dots read them without a further
copy; a pool is never copied, nor held in another dtype. Softmax is online and in float32, merged in ascending
position. A KV tile in which a query sees nothing leaves that query's state as it is, to the bit.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.chosen_keys import HIDDEN, MAX_PIECE, ChosenKeys
from pallas_kernels.kv_pool import KVPool, from_bits
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention.schedule import QueryTiles, Schedule

_PIECE_KEYS = 2048  # that a tile's queries read at once: with 576 values of float32, 4.7 MB
_MAX_VECTOR_DOTS = 4  # up to here XLA:CPU reads K and V faster once per query than once in a thin matrix product
_MAX_KEYS_FIRST = 64  # up to here it is faster with the keys as left operand


def attend_to_chosen(
    queries: jax.Array,  # [Q, N, H] float32, scaled
    places: jax.Array,  # [Q, S, at least top_k] int32, S 1 or K
    most: jax.Array,  # [] int32, keys that one of the queries has at most
    pool: KVPool,  # with the step's K and V
    logits: Logits,
) -> jax.Array:  # [Q, N, V] float32
    """Attention of a tile's queries, each to its own keys. KV heads with keys of their own are queries of their own.

    Keys are gathered piece by piece, in the order of their positions, and merged by an online softmax in float32. Where
    a tile's queries see no more keys than are chosen, `attention` reads all of them once instead.
    """
    T, N, H = queries.shape
    S, G = places.shape[1], N // pool.num_kv_heads
    Q, K = T * S, pool.num_kv_heads // S
    piece = max(MAX_PIECE // 8, min(MAX_PIECE, _PIECE_KEYS // Q))
    heads, places = queries.reshape(Q, K, G, H), places.reshape(Q, -1)

    def one_piece(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, acc = state  # [Q, K, G], [Q, K, G], [Q, K, G, V]
        at = jax.lax.dynamic_slice_in_dim(places, j * piece, piece, axis=1)
        there = (at > 0)[:, None, None]  # [Q, 1, 1, S]
        k, v = _gather_chosen(pool, at, S)
        scores = jnp.einsum("qkgh,qskh->qkgs", heads, k)
        if logits.soft_cap is not None:
            scores = logits.soft_cap * jnp.tanh(scores / logits.soft_cap)
        scores = jnp.where(there, scores, HIDDEN)
        raised = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.where(there, jnp.exp(scores - raised[..., None]), 0.0)
        kept = jnp.exp(highest - raised)
        acc = acc * kept[..., None] + jnp.einsum("qkgs,qskv->qkgv", weights, v)
        return raised, total * kept + jnp.sum(weights, axis=-1), acc

    shape = (Q, K, G)
    empty = (jnp.full(shape, HIDDEN), jnp.zeros(shape), jnp.zeros((*shape, pool.value_dim)))
    highest, total, acc = jax.lax.fori_loop(0, -(-most // piece), one_piece, empty)
    if logits.sinks is not None:  # a sink is one more logit per head, without a value
        sink = jnp.tile(logits.sinks.astype(jnp.float32).reshape(S, K, G), (T, 1, 1))
        raised = jnp.maximum(highest, sink)
        kept = jnp.exp(highest - raised)
        total, acc = total * kept + jnp.exp(sink - raised), acc * kept[..., None]
    return (acc / jnp.where(total > 0, total, 1.0)[..., None]).reshape(T, N, -1)


def _gather_chosen(
    pool: KVPool, at: jax.Array, num_parts: int
) -> tuple[jax.Array, jax.Array]:  # [Q, n, K, H or V] float32
    """K and V of the tokens at these places [Q, n]; values of the null block are zero, for they may be NaN.

    num_parts: query i has the i-th part of the heads, and begins anew after the last.
    """
    P, C, vectors, lanes = pool.values.shape

    def own(count: int) -> jax.Array:  # [Q, 1, count / num_parts]
        return jnp.tile(jnp.arange(count).reshape(num_parts, 1, -1), (len(at) // num_parts, 1, 1))

    flat = pool.values.reshape(P * C, vectors, lanes)
    found = flat[at] if num_parts == 1 else flat[at[..., None], own(vectors)]
    found = from_bits(found, pool).astype(jnp.float32)
    if pool.is_packed:
        k, v = jnp.split(found, [pool.head_dim], axis=-1)
    else:
        k, v = found[:, :, 0::2], found[:, :, 1::2]
    if pool.scales is not None:
        places = at[..., None]
        scales = pool.scales[places // C, own(pool.scales.shape[1]), places % C][..., None]  # [Q, n, 2K, 1]
        k, v = k * scales[:, :, 0::2], v * scales[:, :, 1::2]
    if pool.is_latent:
        k, v = jnp.concatenate([k, v], axis=-1), k
    return k, jnp.where((at > 0)[..., None, None], v, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QueryTile:
    """One query tile; scalars are int32 arrays."""

    table: jax.Array  # [M] int32, the row's blocks
    low: jax.Array  # position of the first query
    high: jax.Array  # last position that a query sees
    positions: jax.Array  # [tile_q] int32 of the lanes
    last: jax.Array  # [tile_q] int32, the last position that each lane sees where attention is causal
    queries: jax.Array  # [K, tile_q * G, H] float32, scaled; for a product of bfloat16 as they are


def attention(
    q: jax.Array,  # [T, N, H]
    pool: KVPool,  # with the step's K and V
    schedule: Schedule,
    logits: Logits,
    chosen: ChosenKeys | None = None,
) -> jax.Array:  # [T, N, V]
    """Attention over the pool, as `paged_attention` of the package defines it."""
    out = jnp.zeros((*q.shape[:2], pool.value_dim), q.dtype)
    for queries in schedule.passes:
        tile = functools.partial(_attend_tile, q, pool, schedule, queries, logits, chosen)
        out = _each_tile(out, queries, lambda i, tile=tile: tile(i).astype(q.dtype))
    return out


def _attend_tile(
    q: jax.Array,
    pool: KVPool,
    schedule: Schedule,
    queries: QueryTiles,
    logits: Logits,
    chosen: ChosenKeys | None,
    i: jax.Array,
) -> jax.Array:  # [tile_q, N, V] float32
    """Attention of the queries of tile i to all keys that they see, or to their chosen keys."""

    def to_all(of: jax.Array | int = 1) -> jax.Array:  # of: 0 attends to nothing
        tile = _load_tile(q, schedule, queries, i, pool, logits.scale)
        first = queries.first_kv[i]
        attended = _attend(tile, pool, schedule, first, jnp.where(of > 0, queries.end_kv[i], first), logits)
        return _tokens_first(attended, queries.tiles.tile)

    if chosen is None:
        return to_all()
    most, places = jnp.minimum(queries.high[i] + 1, chosen.top_k), queries.tiles.load(chosen.places, i)

    def to_chosen(of: jax.Array | int = 1) -> jax.Array:
        scaled = queries.tiles.load(q, i).astype(jnp.float32) * logits.scale
        return attend_to_chosen(scaled, places, most * of, pool, logits)

    chooses = schedule.chooses(queries, i, chosen.top_k)
    if queries.together == 1:
        return jax.lax.cond(chooses, to_chosen, to_all)
    asked = chooses.astype(jnp.int32)  # side by side both are computed: one of them over nothing
    return jnp.where(chooses, to_chosen(asked), to_all(1 - asked))


def _each_tile(out: jax.Array, queries: QueryTiles, one_tile: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`out` with what one_tile(i) gives for each tile, as many side by side as the schedule says."""
    tiles, together = queries.tiles, queries.together
    if together == 1:
        return jax.lax.fori_loop(0, tiles.num_tiles, lambda i, out: tiles.store(out, one_tile(i), i), out)

    def several(group: jax.Array, out: jax.Array) -> jax.Array:
        places = group * together + jnp.arange(together)
        lanes = jax.vmap(one_tile)(jnp.minimum(places, tiles.num_tiles - 1))
        return tiles.store_several(out, lanes, places)

    return jax.lax.fori_loop(0, -(-tiles.num_tiles // together), several, out)


def _load_tile(
    q: jax.Array, schedule: Schedule, queries: QueryTiles, i: jax.Array, pool: KVPool, scale: float
) -> _QueryTile:
    K, (_, N, H), tiles = pool.num_kv_heads, q.shape, queries.tiles
    lanes = tiles.load(q, i)
    if not schedule.keeps_dtype or q.dtype != jnp.bfloat16 or pool.scales is not None:
        lanes = lanes.astype(jnp.float32) * scale
    heads = lanes.reshape(tiles.tile, K, N // K, H).transpose(1, 0, 2, 3).reshape(K, tiles.tile * (N // K), H)
    positions = queries.low[i] - tiles.first_lanes[i] + jnp.arange(tiles.tile)
    ends = schedule.seen_ends
    return _QueryTile(
        table=schedule.block_tables[tiles.runs[i]],
        low=queries.low[i],
        high=queries.high[i],
        positions=positions,
        last=positions if ends is None else jnp.maximum(positions, tiles.load(ends, i) - 1),
        queries=heads,
    )


def _tokens_first(attended: jax.Array, tile_q: int) -> jax.Array:  # [K, tile_q * G, V] -> [tile_q, N, V]
    K, Q, V = attended.shape
    return attended.reshape(K, tile_q, Q // tile_q, V).transpose(1, 0, 2, 3).reshape(tile_q, K * (Q // tile_q), V)


def _attend(
    tile: _QueryTile,
    pool: KVPool,
    schedule: Schedule,
    first_kv: jax.Array,
    end_kv: jax.Array,
    logits: Logits,
) -> jax.Array:  # [K, Q, V] float32; Q = tile_q * G
    """Softmax over the row's visible positions, in one pass over its KV tiles.

    Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022 (its use in tiles).
    """
    K, Q, _ = tile.queries.shape

    def one_kv_tile(j: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        highest, total, acc = state  # [K, Q], [K, Q], [K, Q, V]
        k, v, visible = _load_kv(tile, pool, schedule, j)
        scores = _scores(tile.queries, k, logits.scale)
        if logits.soft_cap is not None:
            scores = logits.soft_cap * jnp.tanh(scores / logits.soft_cap)
        scores = jnp.where(visible, scores, HIDDEN)
        raised = jnp.maximum(highest, jnp.max(scores, axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - raised[..., None]), 0.0)
        kept = jnp.exp(highest - raised)
        return raised, total * kept + jnp.sum(weights, axis=-1), acc * kept[..., None] + _weighted_sum(weights, v)

    empty = (jnp.full((K, Q), HIDDEN), jnp.zeros((K, Q)), jnp.zeros((K, Q, pool.value_dim)))
    highest, total, acc = jax.lax.fori_loop(first_kv, end_kv, one_kv_tile, empty)
    if logits.sinks is not None:  # a sink is one more logit per head, without a value
        sink = jnp.tile(logits.sinks.astype(jnp.float32).reshape(K, -1), (1, len(tile.positions)))
        raised = jnp.maximum(highest, sink)
        kept = jnp.exp(highest - raised)
        total, acc = total * kept + jnp.exp(sink - raised), acc * kept[..., None]
    return acc / jnp.where(total > 0, total, 1.0)[..., None]  # lanes that are not the row's may have seen nothing


def _load_kv(
    tile: _QueryTile, pool: KVPool, schedule: Schedule, j: jax.Array
) -> tuple[
    jax.Array, jax.Array, jax.Array
]:  # k, v: [K, tile_kv, H or V], as the queries; visible: [1, Q or 1, tile_kv]
    """KV tile j of the row. Values that no query of the tile may see are zero, for they may be NaN in the pool."""
    C, tile_kv = pool.block_size, schedule.tile_kv
    block = j * (tile_kv // C) + jnp.arange(tile_kv // C)
    ids = tile.table.at[block].get(mode="clip")  # a tile may reach beyond the table; those positions are hidden
    k, v = _gather(pool, ids, tile.queries.dtype)
    at = j * tile_kv + jnp.arange(tile_kv)
    readable = at <= tile.high
    visible = readable[None]
    if schedule.step.causal:
        visible = at[None] <= tile.last[:, None]
    if schedule.step.window is not None:
        visible &= at[None] >= schedule.step.oldest_seen(tile.positions[:, None])
        readable &= at >= schedule.step.oldest_seen(tile.low)
    if schedule.step.causal:
        visible = jnp.repeat(visible, tile.queries.shape[1] // len(tile.positions), axis=0)
    return k, jnp.where(readable[:, None], v, jnp.zeros((), v.dtype)), visible[None]


def _gather(pool: KVPool, ids: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:  # [K, n * C, H or V] each
    """K and V of the blocks `ids` [n], token after token."""
    P, C, vectors, lanes = pool.values.shape
    K, n = pool.num_kv_heads, len(ids)
    tokens = (ids[:, None] * C + jnp.arange(C)[None]).reshape(1, n * C)
    flat = pool.values.reshape(P * C, vectors, lanes)  # 2K is not split: a TPU would lay the whole pool out anew

    def of(first: int, step: int) -> jax.Array:
        found = flat.at[tokens, jnp.arange(first, vectors, step)[:, None]].get(mode="promise_in_bounds")
        return from_bits(found, pool).astype(dtype)

    k, v = jnp.split(of(0, 1), [pool.head_dim], axis=-1) if pool.is_packed else (of(0, 2), of(1, 2))
    if pool.scales is not None:
        scales = pool.scales.at[ids].get(mode="promise_in_bounds").reshape(n, K, 2, C).transpose(2, 1, 0, 3)
        k_scales, v_scales = scales.reshape(2, K, n * C, 1)
        k, v = k * k_scales, v * v_scales
    return (jnp.concatenate([k, v], axis=-1), k) if pool.is_latent else (k, v)


def _scores(
    queries: jax.Array, k: jax.Array, scale: float
) -> jax.Array:  # [K, Q, H], [K, tile_kv, H] -> [K, Q, tile_kv] float32
    Q = queries.shape[1]
    if queries.dtype == jnp.bfloat16:
        return jnp.einsum("kqh,ksh->kqs", queries, k, preferred_element_type=jnp.float32) * scale
    if Q <= _MAX_VECTOR_DOTS:
        return jnp.stack([jnp.einsum("ksh,kh->ks", k, queries[:, i]) for i in range(Q)], axis=1)
    if Q <= _MAX_KEYS_FIRST:
        return jnp.einsum("ksh,kqh->ksq", k, queries).transpose(0, 2, 1)
    return jnp.einsum("kqh,ksh->kqs", queries, k)


def _weighted_sum(weights: jax.Array, v: jax.Array) -> jax.Array:  # [K, Q, tile_kv], [K, tile_kv, V] -> [K, Q, V]
    Q = weights.shape[1]
    if v.dtype == jnp.bfloat16:
        return jnp.einsum("kqs,ksh->kqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if Q <= _MAX_VECTOR_DOTS:
        return jnp.stack([jnp.einsum("ks,ksh->kh", weights[:, i], v) for i in range(Q)], axis=1)
    return jnp.einsum("kqs,ksh->kqh", weights, v)
