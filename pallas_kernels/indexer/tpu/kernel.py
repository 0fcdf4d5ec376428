"""An indexer for Mosaic TPU, for rows of one query: their best keys, as the kernel for latents asks for them.

Items and steps are those of that kernel's schedule (`paged_attention/tpu/latent/`). The keys of an item are fetched two
steps ahead. A row's scores stay in vector memory, 4 bytes a key; those of some rows that have ended are searched
together (`search.py`), and what was chosen leaves by item. Nothing is sorted, and no list of keys is made: the reader
multiplies whole tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chosen_keys import TileLimits
from pallas_kernels.indexer.tpu.index_movement import BATCH, IndexMovement, IndexScratch, batch_of, scratch_shapes
from pallas_kernels.indexer.tpu.search import GROUP, LOWEST, ScoredRow, limit_to_best, ordered
from pallas_kernels.kv_pool import KVPool
from pallas_kernels.paged_attention.tpu.decode.config import LANES
from pallas_kernels.paged_attention.tpu.decode.ring import Stream, dot
from pallas_kernels.paged_attention.tpu.decode.scratch import named
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.latent_movement import as_dtype
from pallas_kernels.paged_attention.tpu.latent.schedule import LatentSchedule

_HEADS = 8  # of the indexer, padded to a multiple of these
State = tuple[Any, Any, Any]  # rows that have begun, the last item's tile of its row, and rows that were searched


def choose(
    q: jax.Array,  # [T, J, I]
    weights: jax.Array,  # [T, J]
    pool: KVPool,  # with the step's keys
    schedule: LatentSchedule,
    top_k: int,
    *,
    batch: int = BATCH,
    interpret: Any = False,
) -> TileLimits:
    """See the package's choose_keys. batch: rows that are searched together, at most, and interpret: for tests."""
    (T, J, I), config, step = q.shape, schedule.config, schedule.decode
    P, C, _, _ = pool.index_keys.shape
    more = -J % _HEADS
    q = jnp.pad(q, ((0, 0), (0, more), (0, 0)))
    weights = jnp.broadcast_to(jnp.pad(weights, ((0, 0), (0, more)))[..., None], (T, J + more, LANES))
    compute_dtype = q.dtype if q.dtype == pool.index_dtype else jnp.dtype(jnp.float32)
    prefetched, in_hbm = (step.sizes, step.ring), step.in_hbm()
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    rows = config.decode.tile_kv // LANES
    limits = pl.pallas_call(
        functools.partial(_kernel, config=config, top_k=top_k, key_dtype=pool.index_dtype, compute_dtype=compute_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[anywhere] * (len(in_hbm) + 3),
            out_specs=anywhere,
            scratch_shapes=scratch_shapes(q, pool.index_keys, schedule, batch),
        ),
        out_shape=jax.ShapeDtypeStruct((schedule.num_items, rows, LANES), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=config.decode.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="indexer_decode",
    )(*prefetched, *in_hbm, q, weights.astype(jnp.float32), pool.index_keys.reshape(P, C, I))
    return TileLimits(limits=jax.lax.bitcast_convert_type(limits, jnp.float32))


def _kernel(sizes, ring, *refs, config: LatentConfig, top_k: int, key_dtype: jnp.dtype, compute_dtype: jnp.dtype):
    """sizes, ring: of `DecodeSchedule`. refs: the rest of it, inputs, the output, scratch."""
    stream, refs = Stream.of(config.decode.records(config.block_size), ring, [*refs])
    q, weights, keys, limits, *refs = refs
    scratch = named(IndexScratch, refs)
    moves = IndexMovement(
        stream=dataclasses.replace(stream, fetched=scratch.scalars),
        q=q,
        weights=weights,
        pool=keys,
        limits=limits,
        scratch=scratch,
        config=config,
    )
    batch = batch_of(scratch.scores.shape[0], config)
    work = _IndexStages(
        moves=moves, scratch=scratch, top_k=top_k, batch=batch, key_dtype=key_dtype, compute_dtype=compute_dtype
    )
    scratch.leaving[0] = 0
    pl.when(sizes[0] > 0)(functools.partial(_run, sizes[0], moves, work))
    moves.settle()


def _run(steps, moves: IndexMovement, work: _IndexStages):
    """Runs all steps, at least one: an item's products are weighed while those of the next step's are made.

    One idle step more weighs the last ones, so that the search is in the program once.
    """
    ahead, stream = moves.config.decode.ahead, moves.stream

    def step(t, state):
        moves.arrive(t, stream.info(t) >> 1)
        stream.arrive(t)
        moves.settle()
        moves.ask(t + ahead)
        items, state = work.places(t - 1, state)
        work.weigh(t - 1, items)
        work.multiply(t, moves.fetch_blocks(t + ahead))
        stream.fetch(t + ahead)
        return work.choose(t - 1, items, state, least=jnp.where(t == steps, 1, work.batch))

    def begin(t):
        moves.ask(t)
        return moves.fetch_blocks(t)

    stream.begin(begin, ahead)
    jax.lax.fori_loop(0, steps + 1, step, (0, 0, 0))
    stream.end(steps + 1, ahead)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _IndexStages:
    """The arithmetic of one launch; t: a step of the schedule. batch: rows that are searched together."""

    moves: IndexMovement
    scratch: IndexScratch
    top_k: int
    batch: int
    key_dtype: jnp.dtype
    compute_dtype: jnp.dtype

    def multiply(self, t: Any, starts: list[Callable[[], None]]) -> None:
        """Products of the heads' queries and the items' keys; `starts` are DMA starts to be issued between them."""
        x, S = self.scratch, self.moves.config.decode.items
        many = -(-len(starts) // S)
        for s in range(S):
            q = x.queries[self.moves.slot(t, s)].astype(self.compute_dtype)
            x.dots[s] = dot(q, self._keys(t, s), 1)
            for start in starts[s * many : (s + 1) * many]:
                start()

    def places(self, t: Any, state: State) -> tuple[list[tuple[Any, Any]], State]:
        """Tells of each item of step t its row's number and its tile of the row, and the state after it."""
        begun, tile, searched = state
        found = []
        for s in range(self.moves.config.decode.items):
            is_first = self.moves.stream.is_first(t, s)
            found.append((jnp.where(is_first, begun, begun - 1), jnp.where(is_first, 0, tile + 1)))
            tile = found[-1][1]
            begun += jnp.where(is_first & (self.moves.stream.place(t, s) >= 0), 1, 0)
        return found, (begun, tile, searched)

    def weigh(self, t: Any, items: list[tuple[Any, Any]]) -> None:
        """The scores of the items' keys, where the search of their rows looks for them."""
        x, X = self.scratch, self.moves.config.decode.tile_kv
        for s, (row, tile) in enumerate(items):
            weights = x.weights[self.moves.slot(t, s)]  # [J, 128]
            for i in range(X // LANES):
                each = jnp.maximum(x.dots[s, :, pl.ds(i * LANES, LANES)], 0.0) * weights
                x.sums[s, pl.ds(i, 1)] = jnp.sum(each, axis=0, keepdims=True)
            sums = x.sums[s]
            at = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0) * LANES
            at += jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1)
            seen = at <= self.moves.stream.place(t, s)
            self.moves.scores(row)[tile] = jnp.where(seen, ordered(sums), LOWEST)

    def choose(self, t: Any, items: list[tuple[Any, Any]], state: State, least: Any) -> State:
        """Searches the scores of the rows that have ended up to step t, where these are so many at least."""
        begun, tile, searched = state
        for s, (row, own) in enumerate(items):
            pl.when(self.moves.is_last(t, s))(functools.partial(self.moves.end, t, s, row, own))
        last = len(items) - 1
        is_open = (self.moves.stream.place(t, last) >= 0) & ~self.moves.is_last(t, last)
        ended = begun - is_open.astype(jnp.int32)
        pl.when(ended - searched >= least)(functools.partial(self._choose, searched, ended))
        return begun, tile, jnp.where(ended - searched >= least, ended, searched)

    def _choose(self, first: Any, end: Any) -> None:
        """Searches the scores of rows first .. end - 1, and sends off what is chosen."""

        def row_of(i: Any) -> ScoredRow:
            tiles = jnp.where(first + i < end, self.moves.tiles(first + i), 0)
            return ScoredRow(scores=self.moves.scores(first + i), groups=(tiles + GROUP - 1) // GROUP)

        @pl.loop(first, end)
        def _(row: Any) -> None:
            scores, tiles = self.moves.scores(row), self.moves.tiles(row)

            @pl.loop(tiles, (tiles + GROUP - 1) // GROUP * GROUP)
            def _(behind: Any) -> None:
                scores[behind] = jnp.full(scores.shape[1:], LOWEST, jnp.int32)

        limit_to_best(row_of, self.batch + self.moves.config.decode.items - 1, self.top_k)
        pl.loop(first, end)(self.moves.leave)

    def _keys(self, t: Any, s: int) -> jax.Array:
        """[X, I]."""
        X, C = self.moves.config.decode.tile_kv, self.moves.config.block_size
        found = self.scratch.tiles[self.moves.buffer(t), pl.ds(s * (X // C), X // C)]
        return as_dtype(found.reshape(X, -1), self.key_dtype).astype(self.compute_dtype)
