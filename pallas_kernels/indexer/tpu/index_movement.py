"""The transfers of the TPU's indexer, and its vector memory: blocks of keys and queries in, what was chosen out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer.tpu.search import GROUP
from pallas_kernels.paged_attention.tpu.decode.config import LANES
from pallas_kernels.paged_attention.tpu.latent.config import LatentConfig
from pallas_kernels.paged_attention.tpu.latent.latent_movement import BlockMovement
from pallas_kernels.paged_attention.tpu.latent.schedule import LatentSchedule

BATCH = 8  # rows that are searched together, at most
_SCORE_BYTES = 8 * 2**20  # of vector memory, for scores of rows that are longer


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexScratch:
    """References of one launch. S: items of a step. X: tokens of an item. I: values of a key. J: heads."""

    tiles: Any  # [buffers, S * X / C, C, I] of the pool's dtype
    queries: Any  # [slots + 1, J, I], the last of no row
    weights: Any  # [slots + 1, J, 128] float32
    dots: Any  # [S, J, X] float32: products of a step's queries and keys
    sums: Any  # [S, X / 128, 128] float32: their weighed sums
    scores: Any  # [ring of rows, tiles of the longest, X / 128, 128] int32, ordered like scores; then bits of limits
    ends: Any  # [2 * ring] int32 in scalar memory: of each row its number of tiles, and its last item
    leaving: Any  # [1] int32 in scalar memory: tiles of limits that are on their way
    fetched: Any  # DMA semaphore of each buffer
    asked: Any  # DMA semaphore of each slot
    left: Any  # DMA semaphore
    scalars: Any  # DMA semaphores of `Stream`


def slots_of(config: LatentConfig) -> int:
    """Rows whose queries are in vector memory at once, from the step that is weighed to the last that is asked for."""
    return 1 << ((config.decode.ahead + 2) * config.decode.items - 1).bit_length()


def in_groups(tiles: int) -> int:
    """Tiles of the groups that so many are in."""
    return -(-tiles // GROUP) * GROUP


def score_rows(max_tiles: int, tile_kv: int, *, items: int, batch: int) -> int:
    """Rows whose scores are in vector memory at once: so many to be searched together, fewer where they are long."""
    return items + max(1, min(batch, _SCORE_BYTES // (in_groups(max_tiles) * tile_kv * 4) - items))


def batch_of(ring: int, config: LatentConfig) -> int:
    """Rows that are searched together, where a ring has the scores of so many: a step may begin `items` others."""
    return ring - config.decode.items


def scratch_shapes(q: Any, keys: Any, schedule: LatentSchedule, batch: int) -> tuple[Any, ...]:
    """In the order of IndexScratch. q: [T, J, I]. keys: the pool's array. batch: rows searched together, at most."""
    config, (_, J, I) = schedule.config, q.shape
    decode, C, S = config.decode, config.block_size, config.decode.items
    rows, slots = decode.tile_kv // LANES, slots_of(config)
    ring, tiles = score_rows(schedule.max_tiles, decode.tile_kv, items=S, batch=batch), in_groups(schedule.max_tiles)
    return (
        pltpu.VMEM((decode.buffers, S * (decode.tile_kv // C), C, I), keys.dtype),
        pltpu.VMEM((slots + 1, J, I), q.dtype),
        pltpu.VMEM((slots + 1, J, LANES), jnp.float32),
        pltpu.VMEM((S, J, decode.tile_kv), jnp.float32),
        pltpu.VMEM((S, rows, LANES), jnp.float32),
        pltpu.VMEM((ring, tiles, rows, LANES), jnp.int32),
        pltpu.SMEM((2 * ring,), jnp.int32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((decode.buffers,)),
        pltpu.SemaphoreType.DMA((slots,)),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA((decode.records(C).buffers,)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexMovement(BlockMovement):
    """All transfers of a launch. pool: of keys."""

    q: Any  # [T, J, I] in HBM
    weights: Any  # [T, J, 128] float32 in HBM
    limits: Any  # [items, X / 128, 128] int32 in HBM, the bits of `TileLimits`
    scratch: IndexScratch

    def slot(self, t: Any, s: int) -> Any:
        """Where the row's query is; where the item is idle, the place of none."""
        slots = slots_of(self.config)
        return jnp.where(self.stream.place(t, s) >= 0, self.stream.token(t, s) & (slots - 1), slots)

    def ask(self, t: Any) -> None:
        """Starts the DMAs of the queries of rows that begin in step t. It branches, and so parts straight code."""
        for s in range(self.config.decode.items):

            @pl.when(self._brings_query(t, s))
            def _(s: int = s) -> None:
                for copy in self._query(t, s):
                    copy.start()

    def arrive(self, t: Any, num_blocks: Any) -> None:
        """Waits for step t's blocks, whose number the schedule knows, and for the queries of rows that begin."""
        self.arrive_blocks(t, num_blocks)
        for s in range(self.config.decode.items):

            @pl.when(self._brings_query(t, s))
            def _(s: int = s) -> None:
                for copy in self._query(t, s):
                    copy.wait()

    def scores(self, row: Any) -> Any:
        """The scores of the row of this number."""
        return self.scratch.scores.at[self._ring(row)]

    def end(self, t: Any, s: int, row: Any, tile: Any) -> None:
        """Notes that item s of step t is the row's last, its tile of this number."""
        at = 2 * self._ring(row)
        self.scratch.ends[at] = tile + 1
        self.scratch.ends[at + 1] = t * self.config.decode.items + s

    def tiles(self, row: Any) -> Any:
        """How many a row that has ended has."""
        return self.scratch.ends[2 * self._ring(row)]

    def leave(self, row: Any) -> None:
        """Starts the DMAs of the limits of a row that has ended."""
        x, many, at = self.scratch, self.tiles(row), self._ring(row)
        first = x.ends[2 * at + 1] + 1 - many

        @pl.loop(0, many)
        def _(i: Any) -> None:
            pltpu.make_async_copy(x.scores.at[at, i], self.limits.at[first + i], x.left).start()

        x.leaving[0] += many

    def settle(self) -> None:
        """Waits until what leaves has left, so that its scores may be written anew."""
        x, many = self.scratch, self.scratch.leaving[0]

        @pl.loop(0, many)
        def _(_: Any) -> None:
            pltpu.make_async_copy(x.scores.at[0, 0], self.limits.at[0], x.left).wait()

        x.leaving[0] = 0

    def _ring(self, row: Any) -> Any:
        return jax.lax.rem(row, self.scratch.scores.shape[0])

    def _brings_query(self, t: Any, s: int) -> Any:
        return self.stream.is_first(t, s) & (self.stream.place(t, s) >= 0)

    def _query(self, t: Any, s: int) -> list[Any]:
        slot, x = self.slot(t, s), self.scratch
        token = jnp.minimum(self.stream.token(t, s), self.q.shape[0] - 1)
        return [
            pltpu.make_async_copy(there.at[token], here.at[slot], x.asked.at[slot])
            for there, here in ((self.q, x.queries), (self.weights, x.weights))
        ]
