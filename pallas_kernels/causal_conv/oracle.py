"""The causal convolution in NumPy float64, one row and one token at a time."""

from typing import Any

import numpy as np

from pallas_kernels.row_oracle import each_row


def causal_conv(
    x: np.ndarray,  # [T, I]
    weight: np.ndarray,  # [I, W]
    pool: np.ndarray,  # [slots, W - 1, I]
    rows: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, I], pool), padding 0; the null slot is left as it was."""
    x, weight, pool = (a.astype(np.float64) for a in (x, weight, pool))
    out = np.zeros(x.shape)
    for slot, start, count, offset in each_row(rows):
        before = pool[slot] if start else np.zeros(pool.shape[1:])
        inputs = np.concatenate([before, x[offset : offset + count]])
        for i in range(count):
            out[offset + i] = np.sum(inputs[i : i + weight.shape[1]] * weight.T, axis=0)
        if count:
            pool[slot] = inputs[count:]
    return out, pool
