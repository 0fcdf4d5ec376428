"""The transfers of the TPU's decode kernel: blocks from the pool to its buffers, new tokens to both."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu.decode.config import DecodeConfig, DecodeShape
from pallas_kernels.paged_attention.tpu.decode.ring import Stream
from pallas_kernels.paged_attention.tpu.decode.scratch import ScaleScratch, Scratch

_CLEARED = 16  # tokens zeroed by one store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """References of one launch and its transfers; t: a step of the schedule."""

    stream: Stream
    slabs: Any  # [T, vectors, Hp]
    pool: Any  # [P, C, vectors, Hp] in HBM
    scale_pool: Any  # [P, 2K, C] in HBM, None without scales
    scratch: Scratch
    scales: ScaleScratch | None
    shape: DecodeShape
    config: DecodeConfig
    window: int | None
    chunked: bool

    def low(self, t: Any, s: int) -> Any:
        """The first token of item s that its query sees, below 0 for those before it too; None where it sees all."""
        if self.window is None:
            return None
        return self.stream.low(t, s) if self.chunked else self.stream.place(t, s) - self.window + 1

    def fetch(self, t: Any) -> list[Any]:
        """Starts, one function a block, of the DMAs of step t's blocks."""
        buffer, C = t & self.config.buffers - 1, self.shape.block_size
        tile, x, xs = self.config.tile_kv, self.scratch, self.scales
        given, items = self.stream, range(self.config.items)
        rows = [
            (given.place(t, s), given.first_block(t, s), self.low(t, s)) for s in items
        ]  # read once, not for each block

        def start(s: int, b: int) -> None:
            at, first_block, low = rows[s]
            block = given.ring[first_block + b]
            wanted = at >= b * C
            if low is not None:
                wanted &= low < (b + 1) * C

            @pl.when(wanted)
            def _() -> None:
                to = x.tiles.at[buffer, pl.ds(s * tile + b * C, C)]
                pltpu.make_async_copy(self.pool.at[block], to, x.fetched.at[buffer]).start()
                if xs is not None:
                    to = xs.blocks.at[buffer, s * (tile // C) + b]
                    pltpu.make_async_copy(self.scale_pool.at[block], to, xs.fetched.at[buffer]).start()

        return [functools.partial(start, s, b) for s in items for b in range(tile // C)]

    def arrive(self, t: Any, num_blocks: Any) -> None:
        """Waits for step t's blocks; the schedule knows their number."""
        buffer, x, xs = t & self.config.buffers - 1, self.scratch, self.scales
        fetched = x.tiles.at[buffer, pl.ds(0, num_blocks * self.shape.block_size)]
        pltpu.make_async_copy(fetched, fetched, x.fetched.at[buffer]).wait()
        if xs is not None:
            fetched = xs.blocks.at[buffer, pl.ds(0, num_blocks)]
            pltpu.make_async_copy(fetched, fetched, xs.fetched.at[buffer]).wait()

    def clear(self, t: Any) -> None:
        """Zeroes tokens of step t that their query may not see, for they may be NaN."""
        buffer, tile, tiles = t & self.config.buffers - 1, self.config.tile_kv, self.scratch.tiles

        def zeroed(begin: Any, end: Any) -> None:
            many = begin + (end - begin) // _CLEARED * _CLEARED
            for first, last, size in ((begin, many, _CLEARED), (many, end, 1)):

                @pl.loop(first, last, step=size)
                def _(i: Any, size: int = size) -> None:
                    tiles[buffer, pl.ds(i, size)] = jnp.zeros((size, *tiles.shape[2:]), tiles.dtype)

        for s in range(self.config.items):
            at, low = self.stream.place(t, s), self.low(t, s)
            zeroed(s * tile + jnp.where(at < 0, tile, jnp.minimum(at + 1, tile)), (s + 1) * tile)
            if low is not None:
                zeroed(s * tile, s * tile + jnp.clip(low, 0, tile))

    def insert(self, t: Any) -> None:
        """Puts the new tokens of step t's rows in their places in the buffer."""
        buffer, tile = t & self.config.buffers - 1, self.config.tile_kv
        for s in range(self.config.items):
            at = self.stream.place(t, s)
            token = jnp.minimum(self.stream.token(t, s), self.slabs.shape[0] - 1)
            to = jnp.where((at >= 0) & (at < tile), s * tile + at, self.config.items * tile)
            self.scratch.tiles[buffer, to] = self.slabs[token]

    def write(self, t: Any) -> None:
        """Starts the DMAs that bring the new tokens of step t's rows to the pool."""
        C, tile = self.shape.block_size, self.config.tile_kv
        for s in range(self.config.items):
            at = self.stream.place(t, s)
            block = self.stream.ring[self.stream.first_block(t, s) + jnp.clip(at // C, 0, tile // C - 1)]

            @pl.when((at >= 0) & (at < tile))
            def _(at: Any = at, block: Any = block, s: int = s) -> None:
                to = self.pool.at[block, jax.lax.rem(at, C)]
                pltpu.make_async_copy(self.slabs.at[self.stream.token(t, s)], to, self.scratch.written).start()

    def settle(self, num_rows: Any) -> None:
        """Waits until the new tokens of the rows are in the pool."""

        @pl.when(num_rows > 0)
        def _() -> None:
            written = self.slabs.at[pl.ds(0, num_rows)]
            pltpu.make_async_copy(written, written, self.scratch.written).wait()
