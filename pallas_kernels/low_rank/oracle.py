"""add_low_rank in NumPy float64, one token at a time."""

import numpy as np


def add_low_rank(
    y: np.ndarray,  # [T, O]
    x: np.ndarray,  # [T, I]
    a: np.ndarray,  # [S, r, I]
    b: np.ndarray,  # [S, r, O]
    scales: np.ndarray,  # [S]
    slots: np.ndarray,  # [T], 0 for none
) -> np.ndarray:  # [T, O] float64
    """y + scale * x Aᵀ B of the slot that a token names."""
    out = y.astype(np.float64)
    for t, slot in enumerate(slots):
        if slot:
            out[t] += scales[slot - 1] * ((a[slot - 1].astype(np.float64) @ x[t].astype(np.float64)) @ b[slot - 1])
    return out
