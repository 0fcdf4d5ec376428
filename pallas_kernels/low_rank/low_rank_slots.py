"""The A and B of one weight, of all slots."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankSlots:
    """Slot s has the `rank` columns from ((s - 1) % n) * rank on in rank tile (s - 1) // n, n = C // rank.

    What a slot does not fill is zero, in the scales too.
    """

    a: jax.Array  # [G, C, I]
    b: jax.Array  # [G, C, O]
    scales: jax.Array  # [G, C] float32
    rank: int = dataclasses.field(metadata={"static": True})

    @property
    def slots_per_tile(self) -> int:
        return self.a.shape[1] // self.rank


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """Slots of stacked experts; slot s is row s - 1, whole for each expert."""

    a: jax.Array  # [S, E, r, I]
    b: jax.Array  # [S, E, r, O]
    scales: jax.Array  # [S] float32
