"""Walk: the refs that a launch of the TPU's prefill kernel works on, and the order of its items."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu.prefill.config import ALIGNMENT, PrefillConfig, PrefillShape
from pallas_kernels.paged_attention.tpu.prefill.schedule import Tile
from pallas_kernels.paged_attention.tpu.prefill.stretch import Stretch, diagonal, plain, single
from pallas_kernels.ragged_batch import oldest_seen

Item = tuple[Any, Any, Any, Any]  # int32 scalars


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The refs of a launch. t: query tile, j: KV tile, both int32 scalars.

    An item is (KV tile, step, head, chunk).
    """

    # prefetched scalars
    num_tiles: Any  # int32 scalar
    tiles: Any  # [tiles * 9]
    lines: Any  # [2 * words of a KV tile's lines], of the KV tile that is fetched and of the one after it
    # in HBM
    tables: Any  # [lines, 128]
    q: Any  # [N, tokens, lanes]
    pool: Any  # [P, C * vectors, lanes] or [P, C, vectors, lanes]
    scales: Any  # [P, 2K, C] or None
    ends: Any  # [tokens, 128] or None
    out: Any  # [N, tokens, lanes]
    turn: Any  # [1] in scalar memory: KV tiles that were fetched
    # in VMEM
    sinks: Any  # [N, 1, 128] or None
    buffers: Any  # see PrefillConfig.buffers
    semaphores: Any
    # static
    shape: PrefillShape
    config: PrefillConfig
    row_lines: int
    window: int | None
    chunked: bool
    causal: bool
    cap: float | None

    def oldest(self, tile: Tile) -> Any:
        """The first position that any query of the tile sees."""
        return self._oldest_of(tile.low)

    def _oldest_of(self, position) -> Any:
        """The first position that the query at this one sees."""
        return 0 if self.window is None else oldest_seen(position, window=self.window, chunked=self.chunked)

    def first_of(self, tile: Tile, j) -> Item:
        """The first item of KV tile j."""
        return self.first_in(tile, j, self.steps_of(tile, j)[0])

    def first_in(self, tile: Tile, j, step) -> Item:
        """The first item of a step."""
        return j, step, jnp.int32(0), self.chunks_of(tile, j, step)[0]

    def advance(self, item: Item, first_chunk, end_chunk) -> Item:
        """The item that follows in the step: chunks change first, then heads."""
        j, step, head, chunk = item
        is_last = chunk + 1 == end_chunk
        return j, step, jnp.where(is_last, head + 1, head), jnp.where(is_last, first_chunk, chunk + 1)

    def steps_of(self, tile: Tile, j) -> tuple[Any, Any]:
        """Steps first .. end - 1 of KV tile j hold what the query tile may see."""
        start, size = j * self.config.tile_kv, self.config.step_kv
        end = jnp.minimum(pl.cdiv(tile.end_position - start, size), self.config.steps)
        return jnp.maximum(self.oldest(tile) - start, 0) // size, end

    def chunks_of(self, tile: Tile, j, step) -> tuple[Any, Any]:
        """Chunks first .. end - 1 of the query tile have a query that sees a key of the step of KV tile j."""
        size, start = self.config.chunk_q, j * self.config.tile_kv + step * self.config.step_kv
        first, end = tile.first_lane, tile.end_lane
        if self.causal:
            seeing = jnp.maximum(first, start - tile.position)
            first = seeing if self.ends is None else jnp.where(tile.sees_ahead == 1, first, seeing)
        if self.window is not None:
            last = start + self.config.step_kv - 1
            last += self.window - last % self.window - 1 if self.chunked else self.window - 1  # that sees this key
            end = jnp.minimum(end, last + 1 - tile.position)
        return first // size, pl.cdiv(end, size)

    @property
    def blocks(self) -> int:
        """Blocks of a KV tile."""
        return self.config.tile_kv // self.shape.block_size

    def slot_of(self, item: Item) -> Any:
        """Index of the buffers that keep the running maximum and sums of the item's head and chunk."""
        return item[2] * self.config.chunks + item[3]

    def start_of(self, item: Item) -> Any:
        """Position of the item's first key."""
        return item[0] * self.config.tile_kv + item[1] * self.config.step_kv

    def kinds(self, tile: Tile, j, step) -> list[tuple[Any, Stretch]]:
        """The kinds of stretches that fit the config, each with whether it fits this step; a single one always does.

        In a plain one every query sees every key. In a diagonal one key i of the step has the position of query i of
        the tile, and each chunk has queries.
        """
        config, window, start = self.config, self.window, j * self.config.tile_kv + step * self.config.step_kv
        in_window = jnp.bool_(True) if window is None else start >= self._oldest_of(tile.high)
        beside, found = diagonal(config), []
        if window is None or window >= config.step_kv:  # otherwise each step has a key that some query does not see
            seen = start + config.step_kv <= (tile.low + 1 if self.causal else tile.end_position)
            found.append((seen & in_window, plain(config)))
        if self.causal and beside and (window is None or window > config.tile_q - config.chunk_q):
            has_all = (tile.first_lane < config.chunk_q) & (tile.end_lane > config.tile_q - config.chunk_q)
            is_causal = jnp.bool_(True) if self.ends is None else tile.sees_ahead == 0
            found.append((has_all & is_causal & (start == tile.position) & in_window, beside))
        return [*found, (jnp.bool_(True), single(config))]

    def rows(self, part: int) -> Any:
        """A part's rows of an item's logits, weights and sums."""
        rows = self.shape.group * self.config.part_q
        return pl.ds(part * rows, rows)

    def pair(self, part: int) -> Any:
        """A part's rows of the buffers that two neighbouring parts share in turn."""
        return self.rows(part % 2)

    def tokens(self, chunk, part: int) -> Any:
        """A part's tokens of the query tile."""
        first = chunk * self.config.chunk_q + part * self.config.part_q
        return pl.ds(pl.multiple_of(first, ALIGNMENT), self.config.part_q)

    def group(self, group) -> Any:
        """The tokens of a group of the query tile."""
        return pl.ds(pl.multiple_of(group * ALIGNMENT, ALIGNMENT), ALIGNMENT)
