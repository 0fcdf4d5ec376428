"""Causal depthwise convolution over flat ragged tokens, its last inputs kept in slots."""

import jax

from pallas_kernels.causal_conv import xla
from pallas_kernels.shapes import check_shapes
from pallas_kernels.state_rows import StateRows


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    pool: jax.Array,
    rows: StateRows,
    *,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:  # [T, I], dtype of x; the pool
    """y[p] = sum over w < W of weight[:, w] * x[p - (W - 1) + w] for position p of a row; x before 0 is 0.

    x: [T, I]. weight: [I, W], W at least 2. pool: [slots, W - 1, I], a row's last W - 1 inputs, the oldest first;
    returned with those of this step, in place where it is donated. Outputs of padding tokens are finite where x is.
    Products are summed in float32, each token's in one order wherever its inputs come from: bits do not depend on how a
    row is cut into steps. Raises ValueError for shapes that do not fit and for an unknown implementation.
    """
    sizes = check_shapes(("T I", x), ("I W", weight), ("slots V I", pool), ("R", rows.slots))
    if sizes["W"] < 2 or sizes["V"] != sizes["W"] - 1:
        raise ValueError(
            f"weight is {weight.shape} and pool {pool.shape}; W must be at least 2 and the pool keep W - 1"
        )
    if implementation == "xla":
        return xla.causal_conv(x, weight, pool, rows)
    raise ValueError(f"implementation is {implementation!r}; causal_conv has only 'xla'")
