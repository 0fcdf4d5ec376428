"""Mamba2's rule in NumPy float64, one row and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.causal_conv.oracle import each_row


def state_space(
    c: np.ndarray,  # [T, K, A]
    b: np.ndarray,  # [T, K, A]
    v: np.ndarray,  # [T, N, B]
    log_decay: np.ndarray,  # [T, N]
    pool: np.ndarray,  # [slots, N, B, A]
    rows: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, B], pool), padding 0; the null slot is left as it was."""
    out, pool = np.zeros(v.shape), pool.astype(np.float64)
    copies = v.shape[1] // b.shape[1]
    for slot, start, count, offset in each_row(rows):
        for t in range(offset, offset + count):
            for head in range(v.shape[1]):
                said, written = (x[t, head // copies].astype(np.float64) for x in (c, b))
                S = np.zeros(pool.shape[2:]) if start + t == offset else pool[slot, head]
                S = np.exp(float(log_decay[t, head])) * S + np.outer(v[t, head].astype(np.float64), written)
                pool[slot, head] = S
                out[t, head] = S @ said
    return out, pool
