"""state_space in plain XLA: its rule in the loops of `row_recurrence`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.row_recurrence import RowRecurrence
from pallas_kernels.state_rows import StateRows
from pallas_kernels.state_space.math import one_tile, one_token

_RULE = RowRecurrence(one_token=one_token, one_tile=one_tile)


def state_space(
    c: jax.Array,  # [T, K, A]
    b: jax.Array,  # [T, K, A]
    v: jax.Array,  # [T, N, B]
    log_decay: jax.Array,  # [T, N]
    pool: jax.Array,  # [slots, N, B, A]
    rows: StateRows,
    *,
    tile: int,
) -> tuple[jax.Array, jax.Array]:
    """See the package's state_space."""
    T, K, _ = c.shape
    by_group = (T, K, v.shape[1] // K)
    values = v.reshape(*by_group, -1)
    tokens = (c, b, values, log_decay.reshape(by_group))
    out, pool = _RULE(tokens, jnp.zeros(values.shape, v.dtype), pool, rows, tile=tile)
    return out.reshape(v.shape), pool
