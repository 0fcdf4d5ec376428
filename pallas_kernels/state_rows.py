"""StateRows: whose tokens a step computes and where each row's recurrent state is.

Flat tokens of row r are [offsets[r], offsets[r] + counts[r]), at absolute positions starts[r] and on. Its state is at
slots[r] of every state pool [slots, ...]; slot 0 is null, and padding rows write to it. A row at position 0 starts from
zeros; what an earlier row left in its slot is never read.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import static


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleRows:
    """Which rows have one token: the first `count` of `order`, ascending."""

    order: jax.Array  # [R] int32
    count: jax.Array  # [] int32

    @classmethod
    def of(cls, counts: jax.Array) -> SingleRows:
        """counts: [R] int32, tokens of each row."""
        is_single, rows = counts == 1, jnp.arange(len(counts), dtype=jnp.int32)
        # compared, each with each: a sort or a running sum takes many small operations
        before = jnp.sum(is_single[None] & (rows[None] < rows[:, None]), axis=1, dtype=jnp.int32)
        here = is_single[None] & (before[None] == rows[:, None])
        order = jnp.sum(jnp.where(here, rows[None], 0), axis=1, dtype=jnp.int32)
        return cls(order=order, count=jnp.sum(is_single, dtype=jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Tiles of rows of several tokens, cut at multiples of `tile` of the absolute position; `count` of them are there.

    Each has at most `tile` tokens, from firsts[i] on in the flat ones. leads: 1 for a row's first tile of the step.
    begins: 1 where the row's state is zeros before it.
    """

    slots: jax.Array  # [tiles] int32, as all that follow
    firsts: jax.Array
    counts: jax.Array
    leads: jax.Array
    begins: jax.Array
    count: jax.Array  # [] int32
    tile: int = static()

    @classmethod
    def of(cls, rows: StateRows, num_tokens: int, tile: int) -> RowTiles:
        """All tiles of the rows."""
        lead = rows.starts % tile
        num = jnp.where(rows.counts > 1, -(-(lead + rows.counts) // tile), 0)
        most = num_tokens // tile + 2 * min(len(num), num_tokens // 2) + 1
        i = jnp.arange(most, dtype=jnp.int32)
        rows_of = jnp.arange(len(num), dtype=jnp.int32)
        ends = jnp.sum(jnp.where(rows_of[None] <= rows_of[:, None], num[None], 0), axis=1, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(ends[None] <= i[:, None], axis=1, dtype=jnp.int32), len(num) - 1)
        done = (i - ends[row] + num[row]) * tile - lead[row]  # tokens of the row before the tile
        skipped = jnp.maximum(done, 0)
        return cls(
            slots=rows.slots[row],
            firsts=jnp.minimum(rows.offsets[row] + skipped, num_tokens - 1),
            counts=jnp.clip(jnp.minimum(done + tile, rows.counts[row]) - skipped, 0, tile),
            leads=(done <= 0).astype(jnp.int32),
            begins=((done <= 0) & (rows.starts[row] == 0)).astype(jnp.int32),
            count=jnp.sum(num, dtype=jnp.int32),
            tile=tile,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StateRows:
    """The rows of a step.

    decode_only: no row has more than one token. sequential: a recurrence takes one token after the other, so that a
    token's bits depend on the tokens before it and on nothing else. singles, tiles: for kernels, once for all layers.
    """

    slots: jax.Array  # [R] int32
    starts: jax.Array  # [R] int32
    counts: jax.Array  # [R] int32, 0 for rows that compute nothing
    offsets: jax.Array  # [R] int32
    singles: SingleRows | None = None
    tiles: RowTiles | None = None
    decode_only: bool = static(default=False)
    sequential: bool = static(default=False)

    @property
    def targets(self) -> jax.Array:
        """[R] int32: where the rows' states are written; the null slot for rows that compute nothing."""
        return jnp.where(self.counts > 0, self.slots, 0)

    def of_tokens(self, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """[T] int32 each: every token's row, and its place among the row's tokens of this step; R and 0 for padding."""
        ends = self.offsets + self.counts
        t = jnp.arange(num_tokens, dtype=jnp.int32)
        # offsets stand in order, and rows without tokens share theirs with the row after them
        rows = jnp.searchsorted(ends, t, side="right", method="compare_all").astype(jnp.int32)
        real = t < jnp.max(ends)
        return jnp.where(real, rows, len(ends)), jnp.where(real, t - self.offsets[jnp.minimum(rows, len(ends) - 1)], 0)
