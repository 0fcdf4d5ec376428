"""Mamba2's rule in NumPy float64, one row and one token at a time."""

from typing import Any

import numpy as np

from pallas_kernels.row_oracle import recur


def state_space(
    c: np.ndarray,  # [T, K, A]
    b: np.ndarray,  # [T, K, A]
    v: np.ndarray,  # [T, N, B]
    log_decay: np.ndarray,  # [T, N]
    pool: np.ndarray,  # [slots, N, B, A]
    rows: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, B], pool), padding 0; the null slot is left as it was."""

    def change(
        S: np.ndarray, t: int, head: int, said: np.ndarray, written: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        S = np.exp(float(log_decay[t, head])) * S + np.outer(v[t, head].astype(np.float64), written)
        return S, S @ said

    return recur(change, (c, b), v, pool, rows)
