"""The transfers of the TPU's kernel for latents: blocks, queries and new latents in, results and new latents out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import LANES, RING
from pallas_kernels.paged_attention.tpu.decode.ring import Stream
from pallas_kernels.paged_attention.tpu.latent.config import QUERY_TILE_WORDS, LatentConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentScratch:
    """References of one launch. S: items of a step. X: tokens of an item. L: lanes of a latent. V: of its value.

    Q: tokens of a query tile. N: heads; but for queries and outs, those of all of its tokens.
    """

    tiles: Any  # [buffers, S * X / C, C, L] of the pool's dtype
    queries: Any  # [slots, Q, N, L]
    outs: Any  # [slots, Q, N, V]
    scores: Any  # [S, N, X] float32, hidden where the query may not see
    weights: Any  # [S, N, X] of the dtype that products have
    sums: Any  # [S, N, V] float32: weights times values
    states: Any  # [RING, S, N, 128] float32, of the last steps: the row's highest score up to the item
    added: Any  # [2, S, N, 128] float32, of even and odd steps: sums of weights
    results: Any  # [S, N, V] float32: the row's sums up to the item of weights times values
    totals: Any  # [S, N, 128] float32: and of weights
    fetched: Any  # DMA semaphore of each buffer
    written: Any  # DMA semaphore of each buffer
    asked: Any  # DMA semaphore of each slot
    stored: Any  # DMA semaphore of each slot
    scalars: Any  # DMA semaphores of `Stream`


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitScratch:
    """Further scratch where keys are chosen."""

    limits: Any  # [buffers, S, X / 128, 128] float32, of `TileLimits`
    arrived: Any  # DMA semaphore of each buffer


def limit_scratch_shapes(config: LatentConfig) -> tuple[Any, ...]:
    """In the order of LimitScratch."""
    tiles = config.decode
    return (
        pltpu.VMEM((tiles.buffers, tiles.items, tiles.tile_kv // LANES, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
    )


def latent_scratch_shapes(dtype: jnp.dtype, pool_dtype: jnp.dtype, config: LatentConfig) -> tuple[Any, ...]:
    """In the order of LatentScratch. dtype: of queries. pool_dtype: of the pool's array."""
    tiles, N, V, f32 = config.decode, config.queries, config.value_dim, jnp.float32
    S, X, C = tiles.items, tiles.tile_kv, config.block_size
    return (
        pltpu.VMEM((tiles.buffers, S * (X // C), C, config.lanes), pool_dtype),
        pltpu.VMEM((config.slots, config.tile_q, config.num_heads, config.lanes), dtype),
        pltpu.VMEM((config.slots, config.tile_q, config.num_heads, V), dtype),
        pltpu.VMEM((S, N, X), f32),
        pltpu.VMEM((S, N, X), config.compute_dtype),
        pltpu.VMEM((S, N, V), f32),
        pltpu.VMEM((RING, S, N, LANES), f32),
        pltpu.VMEM((2, S, N, LANES), f32),
        pltpu.VMEM((S, N, V), f32),
        pltpu.VMEM((S, N, LANES), f32),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
        pltpu.SemaphoreType.DMA((tiles.buffers,)),
        pltpu.SemaphoreType.DMA((config.slots,)),
        pltpu.SemaphoreType.DMA((config.slots,)),
        pltpu.SemaphoreType.DMA((tiles.records(C).buffers,)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMovement:
    """References of one launch and the transfers of its blocks; t: a step of the schedule, s: an item of it."""

    stream: Stream
    pool: Any  # [P, C, L] in HBM
    scratch: Any  # whose `tiles` blocks go to, with semaphores `fetched`
    config: LatentConfig

    def is_last(self, t: Any, s: int) -> Any:
        """Whether the item has the last token of its row or query tile."""
        at = self.stream.place(t, s)
        return (at >= 0) & (at < self.config.decode.tile_kv)

    def buffer(self, t: Any) -> Any:
        """Where step t's blocks are."""
        return jax.lax.rem(t + self.config.decode.buffers, self.config.decode.buffers)

    def fetch_blocks(self, t: Any) -> list[Callable[[], None]]:
        """Starts of the DMAs of step t's blocks, one function a block."""
        buffer, C, x = self.buffer(t), self.config.block_size, self.scratch
        blocks = self.config.decode.tile_kv // C
        items = range(self.config.decode.items)
        rows = [(self.stream.place(t, s), self.stream.first_block(t, s)) for s in items]  # read once for all blocks

        def start(s: int, b: int) -> None:
            at, first_block = rows[s]

            @pl.when(at >= b * C)
            def _() -> None:
                to = x.tiles.at[buffer, s * blocks + b]
                pltpu.make_async_copy(self.pool.at[self.stream.ring[first_block + b]], to, x.fetched.at[buffer]).start()

        return [functools.partial(start, s, b) for s in items for b in range(blocks)]

    def arrive_blocks(self, t: Any, num_blocks: Any) -> None:
        """Waits for step t's blocks, whose number the schedule knows."""
        buffer, x = self.buffer(t), self.scratch
        blocks = x.tiles.at[buffer, pl.ds(0, num_blocks)]
        pltpu.make_async_copy(blocks, blocks, x.fetched.at[buffer]).wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentMovement(BlockMovement):
    """All transfers of a launch."""

    new: Any  # [T, L] float32, the tokens' latents; None where the pool has them
    q: Any  # [T, N, L] in HBM
    out: Any  # [T, N, V] in HBM
    scratch: LatentScratch
    query_tiles: Any = None  # of `LatentTiles`, in scalar memory; None where each token is one
    limits: Any = None  # of `TileLimits`, in HBM; None where all keys are read
    limited: LimitScratch | None = None

    def last_lane(self, t: Any, s: int) -> Any:
        """Where the query tile has its last token."""
        return 0 if self.query_tiles is None else self._of_tile(self.stream.token(t, s), 2)

    def slot(self, t: Any, s: int) -> Any:
        """Where the query tile's queries and their results are."""
        return self.stream.token(t, s) & (self.config.slots - 1)

    def fetch(self, t: Any) -> list[Any]:
        """Starts of the DMAs of step t, one function a block and one a query."""
        items = range(self.config.decode.items)

        def query(s: int) -> None:
            pl.when(self._brings_query(t, s))(lambda: self._query(t, s).start())

        def limit() -> None:
            pl.when(self.stream.place(t, 0) >= 0)(lambda: self._limits(t).start())

        return [
            *(() if self.limited is None else (limit,)),
            *(functools.partial(query, s) for s in items),
            *self.fetch_blocks(t),
        ]

    def arrive(self, t: Any, num_blocks: Any) -> None:
        """Waits for step t's blocks, whose number the schedule knows, and for the queries of rows that begin."""
        self.arrive_blocks(t, num_blocks)
        for s in range(self.config.decode.items):
            pl.when(self._brings_query(t, s))(self._query(t, s).wait)
        if self.limited is not None:
            self._limits(t).wait()

    def insert(self, t: Any) -> None:
        """Puts the new latents of rows that end in step t into the buffer and the pool; zeroes what is behind them.

        A pool's tokens lie in tiles, so a transfer has a whole group of them: those before the new one as they were,
        those behind it zero, which are the row's own places. What the query may not see may be NaN, hence zeroed.
        Where the pool has the new latents nothing is put, and behind them the buffer alone is zeroed.
        """
        for s in range(self.config.decode.items):
            pl.when(self.is_last(t, s))(functools.partial(self._insert, t, s))

    def release(self, t: Any) -> None:
        """Waits until step t's new latents are in the pool, so that its buffer may be filled anew."""
        if self.new is None:
            return
        for s in range(self.config.decode.items):
            pl.when(self.is_last(t, s))(self._write(t, s).wait)

    def store(self, t: Any, s: int) -> None:
        """Starts the DMAs of the results of the query tile that ends in item s of step t."""
        self._each_result(self.stream.token(t, s), lambda copy: copy.start())

    def free_slot(self, t: Any, s: int) -> None:
        """Waits for the results that were in the slot before, if there were some."""
        before = self.stream.token(t, s) - self.config.slots
        pl.when(before >= 0)(lambda: self._each_result(before, lambda copy: copy.wait()))

    def settle(self, num_tiles: Any) -> None:
        """Waits for the results of the last of so many query tiles."""

        @pl.loop(jnp.maximum(num_tiles - self.config.slots, 0), num_tiles)
        def _(tile: Any) -> None:
            self._each_result(tile, lambda copy: copy.wait())

    def _insert(self, t: Any, s: int) -> None:
        tiles, group, C = self.scratch.tiles, self.config.group, self.config.block_size
        buffer, at = self.buffer(t), self.stream.place(t, s)
        block, first = s * (self.config.decode.tile_kv // C) + at // C, self._first(at)
        rows = tiles.at[buffer, block, pl.ds(first, group)]
        place = jax.lax.broadcasted_iota(jnp.int32, (group, self.config.lanes), 0) + first
        within, found = jax.lax.rem(at, C), as_dtype(rows[...], self.config.pool_dtype).astype(jnp.float32)
        if self.new is None:
            kept = jnp.where(place <= within, found, 0.0)
        else:
            new = jnp.broadcast_to(self.new[pl.ds(self.stream.token(t, s), 1)], (group, self.config.lanes))
            kept = jnp.where(place == within, new, jnp.where(place < within, found, 0.0))
        rows[...] = as_dtype(kept.astype(self.config.pool_dtype), tiles.dtype)

        @pl.loop(first // group + 1, C // group)
        def _(i: Any) -> None:
            behind = pl.ds(pl.multiple_of(i * group, group), group)
            tiles[buffer, block, behind] = jnp.zeros((group, self.config.lanes), tiles.dtype)

        @pl.loop(block + 1, (s + 1) * (self.config.decode.tile_kv // C))
        def _(b: Any) -> None:
            tiles[buffer, b] = jnp.zeros((C, self.config.lanes), tiles.dtype)

        if self.new is not None:
            self._write(t, s).start()

    def _first(self, at: Any) -> Any:
        """The place in its block of the first token of the group that place `at` of the item is in."""
        group = self.config.group
        return pl.multiple_of(jax.lax.rem(at, self.config.block_size) // group * group, group)

    def _write(self, t: Any, s: int) -> Any:
        """The transfer of the group of the new token of item s, which has one."""
        C, group, at, x = self.config.block_size, self.config.group, self.stream.place(t, s), self.scratch
        at = jnp.maximum(at, 0)
        here = s * (self.config.decode.tile_kv // C) + jnp.minimum(at // C, self.config.decode.tile_kv // C - 1)
        there = self.stream.ring[self.stream.first_block(t, s) + jnp.minimum(at // C, self.config.decode.tile_kv // C)]
        place = pl.ds(self._first(at), group)
        return pltpu.make_async_copy(
            x.tiles.at[self.buffer(t), here, place], self.pool.at[there, place], x.written.at[self.buffer(t)]
        )

    def _brings_query(self, t: Any, s: int) -> Any:
        return self.stream.is_first(t, s) & (self.stream.place(t, s) >= 0)

    def _query(self, t: Any, s: int) -> Any:
        slot, tile = self.slot(t, s), self.stream.token(t, s)
        first = jnp.minimum(tile, self.q.shape[0] - 1) if self.query_tiles is None else self._of_tile(tile, 0)
        tokens = self.q.at[pl.ds(first, self.config.tile_q)]
        return pltpu.make_async_copy(tokens, self.scratch.queries.at[slot], self.scratch.asked.at[slot])

    def _limits(self, t: Any) -> Any:
        assert self.limited is not None
        buffer, items = self.buffer(t), self.config.decode.items
        there = self.limits.at[pl.ds(t * items, items)]
        return pltpu.make_async_copy(there, self.limited.limits.at[buffer], self.limited.arrived.at[buffer])

    def _of_tile(self, tile: Any, field: int) -> Any:
        return self.query_tiles[tile * QUERY_TILE_WORDS + field]

    def _each_result(self, tile: Any, do: Callable[[Any], None]) -> None:
        """Does so to the transfer of each result of a query tile, whose other lanes are other rows' tokens."""
        slot = tile & (self.config.slots - 1)
        outs, stored = self.scratch.outs, self.scratch.stored.at[slot]
        if self.query_tiles is None:
            do(pltpu.make_async_copy(outs.at[slot, 0], self.out.at[tile], stored))
            return
        first, begin, last = (self._of_tile(tile, field) for field in range(QUERY_TILE_WORDS))

        @pl.loop(begin, last + 1)
        def _(lane: Any) -> None:
            do(pltpu.make_async_copy(outs.at[slot, lane], self.out.at[first + lane], stored))


def as_dtype(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values with their bits read as another dtype of this size: a pool keeps some floats as integers."""
    return values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)
