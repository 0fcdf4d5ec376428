"""Products of few ranks beside a weight: each token adds scale * B (A x) of the adapter that it names, or nothing.

    slots     ids 1 .. S; token t names slots[t], 0 for none
    columns   of a rank tile: the ranks of neighbouring slots, side by side, so that one product serves several adapters
    pair      a tile of tokens and a rank tile that one of them names; pairs that nobody needs are not computed

          tokens   1 1 0 2 | 5 5 5 5        slots   1 2 3 4 | 5 6 7 8
          pairs    (0, 0), (1, 1)           of the four that there could be

The tokens of a row are neighbours and name one adapter, so pairs follow rows, and a row's cost its own tiles.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.low_rank import xla
from pallas_kernels.low_rank.xla import ExpertSlots, LowRankSlots
from pallas_kernels.shapes import check_shapes

TILE_TOKENS = 256  # of a pair; a step of fewer is one tile
RANK_TILE = 128  # columns, which a matrix unit takes in one pass

__all__ = ["RANK_TILE", "ExpertSlots", "LowRankSlots", "Pairs", "add_low_rank", "pairs_of"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Which tiles meet, of one step; all weights of one form of slots share them."""

    slots: jax.Array  # [T] int32, 0 for none
    token_tiles: jax.Array  # [most pairs] int32
    rank_tiles: jax.Array  # [most pairs] int32
    num_pairs: jax.Array  # [] int32
    tile: int = dataclasses.field(metadata={"static": True})  # tokens


def pairs_of(slots: jax.Array, *, num_tiles: int, slots_per_tile: int, tile: int = TILE_TOKENS) -> Pairs:
    """The pairs of tokens that name these slots [T]. num_tiles: rank tiles. tile: tokens of one, T at most."""
    T = slots.shape[0]
    tile = min(tile, T)
    token_tiles = -(-T // tile)
    named = jnp.where(slots > 0, (slots - 1) // slots_per_tile, num_tiles)
    used = jnp.zeros((token_tiles, num_tiles), bool).at[jnp.arange(T) // tile, named].set(True, mode="drop")
    (found,) = jnp.nonzero(used.reshape(-1), size=used.size, fill_value=0)
    found = found.astype(jnp.int32)
    return Pairs(
        slots=slots,
        token_tiles=found // num_tiles,
        rank_tiles=found % num_tiles,
        num_pairs=jnp.sum(used, dtype=jnp.int32),
        tile=tile,
    )


def add_low_rank(y: jax.Array, x: jax.Array, weights: LowRankSlots, pairs: Pairs) -> jax.Array:
    """y [T, O] with scale * B (A x[t]) of slot pairs.slots[t] added to each row, x [T, I]; the dtype of y.

    Both products are summed in float32; A x is rounded to the dtype of B between them. A token's bits depend on its own
    row, and on where its slot lies in its rank tile; a row that names no slot keeps its bits.
    """
    check_shapes(("T O", y), ("T I", x), ("G C I", weights.a), ("G C O", weights.b), ("G C", weights.scales))
    return xla.add_low_rank(
        y,
        x,
        weights,
        slots=pairs.slots,
        token_tiles=pairs.token_tiles,
        rank_tiles=pairs.rank_tiles,
        num_pairs=pairs.num_pairs,
        tile=pairs.tile,
    )
