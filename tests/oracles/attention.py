"""Paged attention in NumPy float64, one query at a time."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.cases import Arguments, Case
from tests.oracles import kv_pool


def paged_attention(
    q: np.ndarray,  # [T, N, H]
    k: np.ndarray,  # [T, K, H]
    v: np.ndarray,  # [T, K, H]
    values: np.ndarray,  # [P, C, 2K, H]
    scales: np.ndarray | None,  # [P, 2K, C]
    block_tables: np.ndarray,  # [R, M]
    starts: np.ndarray,  # [R]
    counts: np.ndarray,  # [R]
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,  # [N]
    causal: bool = True,
) -> np.ndarray:  # [T, N, H] float64, zero for padding tokens
    """Writes k and v; then softmax(scale * q k^T) v over the positions that each query may see, no others read."""
    C = values.shape[1]
    rows = list(zip(block_tables, starts, counts, strict=True))
    places = [(table[p // C], p % C) for table, start, count in rows for p in range(start, start + count)]
    pool = kv_pool.decode(*kv_pool.write(values, scales, k, v, places))
    out = np.zeros(q.shape)
    token = 0
    for table, start, count in rows:
        for position in range(start, start + count):
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(oldest, position + 1 if causal else start + count)
            kv = pool[table[seen // C], seen % C]  # [S, 2K, H]
            out[token] = _attend(q[token].astype(np.float64), kv[:, 0::2], kv[:, 1::2], scale, soft_cap, sinks)
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


def of_case(case: Case, arguments: Arguments) -> np.ndarray:  # [T, N, H] float64
    """What paged attention of a case is."""
    a, batch, sinks = arguments, arguments.batch, arguments.sinks
    return paged_attention(
        *(np.asarray(x) for x in (a.q, a.k, a.v)),
        *kv_pool.arrays(a.pool),
        *(np.asarray(x) for x in (batch.block_tables, batch.starts, batch.counts)),
        **case.attention,
        window=case.window,
        sinks=None if sinks is None else np.asarray(sinks),
        causal=case.causal,
    )
