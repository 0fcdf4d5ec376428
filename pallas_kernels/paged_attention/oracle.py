"""Paged attention in NumPy float64, one query at a time."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.kv_pool import KVPool
from pallas_kernels.kv_write import oracle as kv_pool
from pallas_kernels.paged_attention.cases import Arguments, Case


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
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,  # [N]
    causal: bool = True,
    seen_ends: np.ndarray | None = None,  # [T]
    queries: Sequence[int] | None = None,
) -> np.ndarray:  # [T, N, H] float64, zero for padding tokens
    """Writes k and v; then softmax(scale * q k^T) v over the positions that each query may see, no others read.

    queries: the tokens that are computed, the others are zero; None is all of them.
    """
    C = values.shape[1]
    rows = list(zip(block_tables, starts, counts, strict=True))
    places = [(table[p // C], p % C) for table, start, count in rows for p in range(start, start + count)]
    pool = kv_pool.decode(*kv_pool.write(values, scales, k, v, places))
    out = np.zeros(q.shape)
    token = 0
    for table, start, count in rows:
        for position in range(start, start + count):
            if queries is not None and token not in queries:
                token += 1
                continue
            oldest = 0 if window is None else max(0, position - window + 1)
            oldest = position - position % window if window is not None and chunked else oldest
            end = position + 1 if causal else start + count
            seen = np.arange(oldest, end if seen_ends is None else max(end, seen_ends[token]))
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
    """The result of paged attention for a case."""
    a, batch, sinks = arguments, arguments.batch, arguments.sinks
    return paged_attention(
        np.asarray(a.q),
        *of_heads(case, a.k, a.v, a.pool),
        np.asarray(batch.block_tables),
        np.asarray(batch.starts),
        np.asarray(batch.counts),
        **case.attention,
        window=case.window,
        chunked=case.chunked,
        sinks=None if sinks is None else np.asarray(sinks),
        causal=case.causal,
        seen_ends=case.seen_ends,
    )[..., : case.value_dim]


def of_heads(case: Case, k: Any, v: Any, pool: KVPool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """k, v, values and scales as K and V of heads. A latent's K is all of it; V has zeros where K is wider."""
    k, v, (values, scales) = np.asarray(k), np.asarray(v), kv_pool.arrays(pool)
    if case.v_head_dim is not None:
        wider = case.head_dim - case.value_dim
        v, values = np.pad(v, [(0, 0), (0, 0), (0, wider)]), np.pad(values, [(0, 0)] * 3 + [(0, wider)])
        values = values.reshape(*values.shape[:2], -1, case.head_dim)
    if case.rope_dim is None:
        return k, v, values, scales
    assert scales is None, "scales of a latent's two parts are not those of a K and a V"
    key, pad = np.concatenate([k, v], axis=-1), [(0, 0)] * (values.ndim - 1) + [(0, case.rope_dim)]
    both = np.concatenate([values, np.pad(values[..., : case.head_dim], pad)], axis=2)
    return key, np.pad(k, pad[1:]), both, None
