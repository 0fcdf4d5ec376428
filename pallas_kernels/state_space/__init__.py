"""Mamba2's state space over flat ragged tokens, its states kept in slots."""

import jax

from pallas_kernels.row_recurrence import RowRecurrence
from pallas_kernels.row_recurrence.tpu_support import check_states
from pallas_kernels.shapes import check_counts, check_shapes
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space.math import one_tile, one_token
from pallas_kernels.state_space.space_tile import one_row
from pallas_kernels.state_space.space_tile import one_tile as one_tile_on_tpu

IN_XLA = RowRecurrence(one_token=one_token, one_tile=one_tile)
ON_TPU = RowRecurrence(one_token=one_token, one_tile=one_tile, heads=one_row, heads_tile=one_tile_on_tpu)


def state_space(
    c: jax.Array,
    b: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    pool: jax.Array,
    rows: StateRows,
    *,
    tile: int | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:  # [T, N, B], dtype of v; the pool
    """o = S c, where each token of a row changes its S [B, A]:  S ← exp(log_decay) S + v bᵀ.

    c, b: [T, K, A]; head n of N uses those of group n // (N / K). v: [T, N, B], inputs times their steps. log_decay:
    [T, N] float32, at most 0. pool: [slots, N, B, A] float32, a row's S; returned with those after the step, in place
    where it is donated. Outputs of padding tokens are 0. All is computed in float32.
    tile, implementation, and the order in which tokens are taken: as in `gated_delta`. It has eight parameters: the
    arrays of the rule, one by one, so that a call reads like it.
    Raises ValueError for shapes that do not fit, for states that the kernel does not take and for an unknown
    implementation.
    Source: Dao, Gu 2024, Transformers are SSMs, equation 1 with a scalar decay (the rule) and section 6 (tiles).
    """
    sizes = check_shapes(
        ("T K A", c),
        ("T K A", b),
        ("T N B", v),
        ("T N", log_decay),
        ("slots N B A", pool),
        ("R", rows.slots),
    )
    check_counts(tile=tile)
    if sizes["N"] % sizes["K"]:
        raise ValueError(f"v has {sizes['N']} heads, no multiple of the {sizes['K']} groups of b")
    if implementation == "xla":
        return IN_XLA((c, b), v, (log_decay,), pool, rows, tile=tile)
    if implementation == "mosaic_tpu":
        check_states(pool.shape[1:])
        return ON_TPU((c, b), v, (log_decay,), pool, rows, tile=tile)
    raise ValueError(f"implementation is {implementation!r}; state_space has 'xla' and 'mosaic_tpu'")
