"""The rows of a step over KV blocks: which tokens are real, where their K and V are written, and what they see."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The rows of a step. Tokens of a row are neighbours, rows stand in order; padding rows have count 0.

    Row r computes positions starts[r] .. starts[r] + counts[r] - 1; what came before them is in the pool.
    seen_ends: where some tokens of a causal row see more than what is before them, as those of an image see all of it,
    the position behind the last that each sees; 0 for the others. The row computes all of these in the same step.
    """

    block_tables: jax.Array  # [R, M] int32
    starts: jax.Array  # [R] int32, position of the first query
    counts: jax.Array  # [R] int32, queries of the row
    query_offsets: jax.Array  # [R] int32, flat index of the row's first query
    seen_ends: jax.Array | None = None  # [T] int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of a step, its flat tokens and those of a block, and what tokens see: see `make_schedule`."""

    num_tokens: int
    block_size: int
    window: int | None = None
    chunked: bool = False
    causal: bool = True

    def oldest_seen(self, positions: jax.Array) -> jax.Array:
        """See the function of this name."""
        return oldest_seen(positions, window=self.window, chunked=self.chunked)


def oldest_seen(positions: jax.Array, *, window: int | None, chunked: bool) -> jax.Array:
    """The oldest position that the query at each position sees, of the shape of `positions`."""
    if window is None:
        return jnp.zeros_like(positions)
    return positions - positions % window if chunked else jnp.maximum(positions - window + 1, 0)


def write_places(batch: RaggedBatch, *, num_tokens: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Block and offset, [T] int32 each, at which each token's K and V are written; block 0 for padding tokens."""
    rows, done = rows_of_tokens(batch, num_tokens)
    real = (done >= 0) & (done < batch.counts[rows])
    positions = jnp.where(real, batch.starts[rows] + done, 0)
    return jnp.where(real, batch.block_tables[rows, positions // block_size], 0), positions % block_size


def is_real(batch: RaggedBatch, *, num_tokens: int) -> jax.Array:  # [T] bool
    """Which tokens belong to a row."""
    rows, done = rows_of_tokens(batch, num_tokens)
    return (done >= 0) & (done < batch.counts[rows])


def rows_of_tokens(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array]:  # [T] int32 each
    """The row of each token, and how many tokens of it come before; of padding the latter is out of range."""
    t = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = jax.lax.cummax(jnp.where(batch.counts > 0, batch.query_offsets + batch.counts, 0))
    rows = jnp.minimum(jnp.searchsorted(ends, t, side="right", method="compare_all").astype(jnp.int32), len(ends) - 1)
    return rows, t - batch.query_offsets[rows]
