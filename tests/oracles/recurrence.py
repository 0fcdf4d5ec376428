"""The gated delta rule and the causal convolution in NumPy float64, one row and one token at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


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


def each_row(rows: Any) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, offset) of the rows that are there."""
    columns = (np.asarray(x).tolist() for x in (rows.slots, rows.starts, rows.counts, rows.offsets))
    return [row for row in zip(*columns, strict=True) if row[0]]
