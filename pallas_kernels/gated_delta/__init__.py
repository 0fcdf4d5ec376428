"""The gated delta rule over flat ragged tokens, its states kept in slots."""

import jax

from pallas_kernels.gated_delta.delta_tile import one_row
from pallas_kernels.gated_delta.delta_tile import one_tile as one_tile_on_tpu
from pallas_kernels.gated_delta.math import one_tile, one_token
from pallas_kernels.row_recurrence import RowRecurrence
from pallas_kernels.row_recurrence.tpu_support import check_states
from pallas_kernels.shapes import check_counts, check_shapes
from pallas_kernels.state_rows import StateRows

IN_XLA = RowRecurrence(one_token=one_token, one_tile=one_tile)
ON_TPU = RowRecurrence(one_token=one_token, one_tile=one_tile, heads=one_row, heads_tile=one_tile_on_tpu)


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    rows: StateRows,
    *,
    tile: int | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:  # [T, N, B], dtype of v; the pool
    """o = Sᵀ q, where each token of a row changes its S [A, B]:  S ← exp(log_decay) S;  S ← S + k (beta (v - Sᵀ k))ᵀ.

    q, k: [T, K, A]; head n of N uses those of head n // (N / K). v: [T, N, B]. log_decay: [T, N] float32, at most 0;
    or [T, N, A], one for each channel of k, so that exp(log_decay) S weighs the rows of S.
    beta: [T, N] float32. pool: [slots, N, A, B] float32, a row's S; returned with those after the step, in place where
    it is donated. Outputs of padding tokens are 0. All is computed in float32.
    tile: tokens of a row that are computed at once where it has several; tiles are cut at multiples of `tile` of the
    absolute position, so rows have the same bits however they are cut into steps at such positions. None is
    choose_tile's. Rows of one token are taken one token at a time, and so are all with `rows.sequential`.
    implementation: "xla", or "mosaic_tpu", whose kernel takes the rows of one token and leaves the others to XLA.
    It has nine parameters: the arrays of the rule, one by one, so that a call reads like it.
    Raises ValueError for shapes that do not fit, for states that the kernel does not take and for an unknown
    implementation.
    Source: Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, equations 10 (the rule) and section 3.3 (tiles); Kimi
    Team 2025, Kimi Linear, section 3 (decays of channels).
    """
    sizes = check_shapes(
        ("T K A", q),
        ("T K A", k),
        ("T N B", v),
        ("T N A" if log_decay.ndim == 3 else "T N", log_decay),
        ("T N", beta),
        ("slots N A B", pool),
        ("R", rows.slots),
    )
    check_counts(tile=tile)
    if sizes["N"] % sizes["K"]:
        raise ValueError(f"v has {sizes['N']} heads, no multiple of the {sizes['K']} of k")
    if implementation == "xla":
        return IN_XLA((q, k), v, (log_decay, beta), pool, rows, tile=tile)
    if implementation == "mosaic_tpu":
        check_states(pool.shape[1:])
        return ON_TPU((q, k), v, (log_decay, beta), pool, rows, tile=tile)
    raise ValueError(f"implementation is {implementation!r}; gated_delta has 'xla' and 'mosaic_tpu'")
