"""Paged attention in NumPy float64, one query at a time."""

from __future__ import annotations

import numpy as np


def paged_attention(
    q: np.ndarray,  # [T, N, H]
    pool: np.ndarray,  # [P, C, 2K, H]
    block_tables: np.ndarray,  # [R, M]
    starts: np.ndarray,  # [R]
    counts: np.ndarray,  # [R]
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,  # [N]
) -> np.ndarray:  # [T, N, H] float64, zero for padding tokens
    """softmax(scale * q k^T) v over the positions that each query may see, which are the only ones read."""
    q, pool = q.astype(np.float64), pool.astype(np.float64)
    out = np.zeros_like(q)
    token = 0
    for table, start, count in zip(block_tables, starts, counts, strict=True):
        for position in range(start, start + count):
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(oldest, position + 1)
            kv = pool[table[seen // pool.shape[1]], seen % pool.shape[1]]  # [S, 2K, H]
            out[token] = _attend(q[token], kv[:, 0::2], kv[:, 1::2], scale, soft_cap, sinks)
            token += 1
    return out


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, soft_cap: float | None, sinks: np.ndarray | None
) -> np.ndarray:
    N = q.shape[0]
    k, v = (np.repeat(a, N // a.shape[1], axis=1) for a in (k, v))  # [S, N, H]
    logits = np.einsum("nh,snh->ns", q, k) * scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    if sinks is not None:
        logits = np.concatenate([logits, sinks.astype(np.float64)[:, None]], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ns,snh->nh", weights[:, : len(k)], v)
