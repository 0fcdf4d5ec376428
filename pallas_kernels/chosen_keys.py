"""The keys that an indexer chose for the tokens of a step: a list, which XLA gathers, or a mask of whole tiles."""

import dataclasses

import jax

from pallas_kernels.ragged import static

HIDDEN = -1e30  # finite: the difference of two is 0, not NaN
MAX_PIECE = 128  # places that are read at once, at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenKeys:
    """The keys that each token attends to, the earliest first: the same for all KV heads, or of each its own.

    A key is named by its place among all tokens of the pool, block * C + offset. Behind a token's last there is 0, in
    the null block. Layers of one cache group share them, for they have the same blocks.
    """

    places: jax.Array  # [T, 1 or K, at least top_k, a multiple of 128] int32
    top_k: int = static()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TileLimits:
    """The keys that rows of one query attend to, for a kernel that reads whole tiles.

    Items are those of a `LatentSchedule`. Layers of one cache group share them, for they have the same items.
    """

    limits: jax.Array  # [items, X / 128, 128] float32, what a key's score is at most: infinity, or HIDDEN if not chosen


Chosen = ChosenKeys | TileLimits  # as the implementation of a step's attention takes them


def padded_to_pieces(top_k: int) -> int:
    """The last axis of places."""
    return -(-top_k // MAX_PIECE) * MAX_PIECE
