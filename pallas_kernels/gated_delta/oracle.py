"""The gated delta rule in NumPy float64, one row and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.causal_conv.oracle import each_row


def gated_delta(
    q: np.ndarray,  # [T, K, A]
    k: np.ndarray,  # [T, K, A]
    v: np.ndarray,  # [T, N, B]
    log_decay: np.ndarray,  # [T, N]
    beta: np.ndarray,  # [T, N]
    pool: np.ndarray,  # [slots, N, A, B]
    rows: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, B], pool), padding 0; the null slot is left as it was."""
    out, pool = np.zeros(v.shape), pool.astype(np.float64)
    copies = v.shape[1] // k.shape[1]
    for slot, start, count, offset in each_row(rows):
        for t in range(offset, offset + count):
            for head in range(v.shape[1]):
                key, query = (x[t, head // copies].astype(np.float64) for x in (k, q))
                S = np.zeros(pool.shape[2:]) if start + t == offset else pool[slot, head]
                S = np.exp(float(log_decay[t, head])) * S
                S = S + np.outer(key, float(beta[t, head]) * (v[t, head].astype(np.float64) - S.T @ key))
                pool[slot, head] = S
                out[t, head] = S.T @ query
    return out, pool
