"""The gated delta rule in NumPy float64, one row and one token at a time."""

from typing import Any

import numpy as np

from pallas_kernels.row_oracle import recur


def gated_delta(
    q: np.ndarray,  # [T, K, A]
    k: np.ndarray,  # [T, K, A]
    v: np.ndarray,  # [T, N, B]
    log_decay: np.ndarray,  # [T, N] or [T, N, A]
    beta: np.ndarray,  # [T, N]
    pool: np.ndarray,  # [slots, N, A, B]
    rows: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, B], pool), padding 0; the null slot is left as it was."""

    def change(S: np.ndarray, t: int, head: int, query: np.ndarray, key: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        S = np.exp(log_decay[t, head].astype(np.float64)).reshape(-1, 1) * S
        S = S + np.outer(key, float(beta[t, head]) * (v[t, head].astype(np.float64) - S.T @ key))
        return S, S.T @ query

    return recur(change, (q, k), v, pool, rows)
