"""Rows with states in NumPy float64, one row and one token at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Change = Callable[..., tuple[np.ndarray, np.ndarray]]  # (S, t, head, *shared [A]) -> (S, out [B])


def each_row(rows: Any) -> list[tuple[int, int, int, int]]:
    """(slot, start, count, offset) of the rows that are there."""
    columns = (np.asarray(x).tolist() for x in (rows.slots, rows.starts, rows.counts, rows.offsets))
    return [row for row in zip(*columns, strict=True) if row[0]]


def recur(
    change: Change, shared: Sequence[np.ndarray], v: np.ndarray, pool: np.ndarray, rows: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(out [T, N, B], pool), padding 0; the null slot is left as it was. shared: [T, K, A] each; v: [T, N, B]."""
    out, pool = np.zeros(v.shape), pool.astype(np.float64)
    copies = v.shape[1] // shared[0].shape[1]
    for slot, start, count, offset in each_row(rows):
        for t in range(offset, offset + count):
            for head in range(v.shape[1]):
                S = np.zeros(pool.shape[2:]) if start + t == offset else pool[slot, head]
                vectors = (x[t, head // copies].astype(np.float64) for x in shared)
                pool[slot, head], out[t, head] = change(S, t, head, *vectors)
    return out, pool
