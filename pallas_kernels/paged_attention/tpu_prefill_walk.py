"""What a launch of the TPU's prefill kernel works on: its references, and which items there are where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.tpu_prefill_config import ALIGNMENT, PrefillConfig, PrefillShape
from pallas_kernels.paged_attention.tpu_prefill_schedule import Tile
from pallas_kernels.paged_attention.tpu_prefill_stretch import Stretch, diagonal, plain, single

Item = tuple[Any, Any, Any, Any]  # int32 scalars


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The refs of a launch. t: query tile, j: KV tile, both int32 scalars.

    An item is (KV tile, step, head, chunk).
    """

    # prefetched scalars
    num_tiles: Any  # int32 scalar
    tiles: Any  # [tiles * 8]
    block_tables: Any  # [R * M]
    # in HBM
    q: Any  # [N, tokens, lanes]
    pool: Any  # [P, C * vectors, lanes] or [P, C, vectors, lanes]
    scales: Any  # [P, 2K, C] or None
    out: Any  # [N, tokens, lanes]
    # in VMEM
    sinks: Any  # [N, 1, 128] or None
    buffers: Any  # see PrefillConfig.buffers
    semaphores: Any
    # static
    shape: PrefillShape
    config: PrefillConfig
    max_blocks: int
    window: int | None
    causal: bool
    cap: float | None

    def first_of(self, tile: Tile, j) -> Item:
        """The first item of KV tile j."""
        step = self.steps_of(tile, j)[0]
        return j, step, jnp.int32(0), self.chunks_of(tile, j, step)[0]

    def advance(self, item: Item, chunks: Callable[[Any], tuple[Any, Any]]) -> Item:
        """The item that follows in the KV tile: chunks change first, then heads, then steps. chunks: of a step."""
        j, step, head, chunk = item
        first, end = chunks(step)
        is_last_chunk = chunk + 1 == end
        is_last_head = is_last_chunk & (head + 1 == self.shape.num_kv_heads)
        head = jnp.where(is_last_head, 0, jnp.where(is_last_chunk, head + 1, head))
        chunk = jnp.where(is_last_head, chunks(step + 1)[0], jnp.where(is_last_chunk, first, chunk + 1))
        return j, jnp.where(is_last_head, step + 1, step), head, chunk

    def count_of(self, tile: Tile, j) -> Any:
        """Items of KV tile j."""
        (first_step, end_step), counts = self.steps_of(tile, j), []
        for step in range(self.config.steps):
            first, end = self.chunks_of(tile, j, step)
            counts.append(jnp.where((first_step <= step) & (step < end_step), end - first, 0))
        return sum(counts) * self.shape.num_kv_heads

    def steps_of(self, tile: Tile, j) -> tuple[Any, Any]:
        """Steps first .. end - 1 of KV tile j hold what the query tile may see."""
        start, size = j * self.config.tile_kv, self.config.step_kv
        end = jnp.minimum(pl.cdiv(tile.end_position - start, size), self.config.steps)
        return jnp.maximum(tile.oldest(self.window) - start, 0) // size, end

    def chunks_of(self, tile: Tile, j, step) -> tuple[Any, Any]:
        """Chunks first .. end - 1 of the query tile have a query that sees a key of the step of KV tile j."""
        size, start = self.config.chunk_q, j * self.config.tile_kv + step * self.config.step_kv
        first, end = tile.first_lane, tile.end_lane
        if self.causal:
            first = jnp.maximum(first, start - tile.position)
        if self.window is not None:
            end = jnp.minimum(end, start + self.config.step_kv - 1 + self.window - tile.position)
        return first // size, pl.cdiv(end, size)

    def slot_of(self, item: Item) -> Any:
        """Where the running maximum and sums of the item's head and chunk are kept."""
        return item[2] * self.config.chunks + item[3]

    def start_of(self, item: Item) -> Any:
        """Position of the item's first key."""
        return item[0] * self.config.tile_kv + item[1] * self.config.step_kv

    def choose(self, tile: Tile, items: list[Item], left) -> list[tuple[Any, Stretch]]:
        """The stretches that may be next, and for each whether it is; one of them is.

        items: the next ones. left: how many there are in the KV tile.
        """
        several, beside, window = plain(self.config), diagonal(self.config), self.window
        found: list[tuple[Any, Stretch]] = []
        if window is None or window >= self.config.step_kv:  # else each step has a key that is hidden from somebody
            is_plain = (left >= several.items) & ~self.hides(tile, items[0], items[several.items - 1])
            found.append((is_plain, several))
        if self.causal and beside and (window is None or window > self.config.tile_q - self.config.chunk_q):
            found.append((self.is_diagonal(tile, items[0]), beside))
        found.append((jnp.bool_(True), single(self.config)))
        taken, chosen = jnp.bool_(False), []
        for may_be, stretch in found:
            chosen.append((may_be & ~taken, stretch))
            taken |= may_be
        return chosen

    def is_diagonal(self, tile: Tile, item: Item) -> Any:
        """Whether a head's items begin with this one, key i of the step beside query i of the tile.

        Each chunk has a query of the row, and a window hides none of the keys.
        """
        start, size = self.start_of(item), self.config.chunk_q
        has_all = (tile.first_lane < size) & (tile.end_lane > self.config.tile_q - size)
        found = has_all & (item[3] == 0) & (start == tile.position)
        return found if self.window is None else found & (start > tile.high - self.window)

    def hides(self, tile: Tile, first: Item, last: Item) -> Any:
        """Whether some query of the tile may not see some key of the items first .. last of a KV tile."""
        end = self.start_of(last) + self.config.step_kv
        hidden = end > (tile.low + 1 if self.causal else tile.end_position)
        return hidden if self.window is None else hidden | (self.start_of(first) <= tile.high - self.window)

    def rows(self, part: int) -> Any:
        """A part's rows of an item's logits, weights and sums."""
        rows = self.shape.group * self.config.part_q
        return pl.ds(part * rows, rows)

    def pair(self, part: int) -> Any:
        """A part's rows of what only two neighbouring parts have at a time."""
        return self.rows(part % 2)

    def tokens(self, chunk, part: int) -> Any:
        """A part's tokens of the query tile."""
        first = chunk * self.config.chunk_q + part * self.config.part_q
        return pl.ds(pl.multiple_of(first, ALIGNMENT), self.config.part_q)

    def group(self, group) -> Any:
        """The tokens of a group of the query tile."""
        return pl.ds(pl.multiple_of(group * ALIGNMENT, ALIGNMENT), ALIGNMENT)
