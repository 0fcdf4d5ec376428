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
class StateRows:
    """The rows of a step.

    decode_only: no row has more than one token. sequential: a recurrence takes one token after the other, so that a
    token's bits depend on the tokens before it and on nothing else. singles: for kernels, once for all layers.
    """

    slots: jax.Array  # [R] int32
    starts: jax.Array  # [R] int32
    counts: jax.Array  # [R] int32, 0 for rows that compute nothing
    offsets: jax.Array  # [R] int32
    singles: SingleRows | None = None
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
