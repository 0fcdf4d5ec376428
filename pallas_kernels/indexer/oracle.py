"""An indexer in NumPy float64, one query at a time."""

from __future__ import annotations

import numpy as np


def choose(
    q: np.ndarray,  # [T, J, I]
    weights: np.ndarray,  # [T, J]
    key: np.ndarray,  # [T, I]
    index_keys: np.ndarray,  # [P, C, I], before the step
    block_tables: np.ndarray,  # [R, M]
    starts: np.ndarray,  # [R]
    counts: np.ndarray,  # [R]
    *,
    top_k: int,
) -> list[tuple[list[int], float]]:
    """What each token that is no padding chooses: positions, ascending, and how far the last is from the next score.

    The distance is infinite where all are chosen.
    """
    C, pool = index_keys.shape[1], index_keys.astype(np.float64)
    rows = list(zip(block_tables, starts, counts, strict=True))
    token = 0
    for table, start, count in rows:
        for position in range(start, start + count):
            pool[table[position // C], position % C] = key[token]
            token += 1
    found, token = [], 0
    for table, start, count in rows:
        for position in range(start, start + count):
            seen = np.arange(position + 1)
            dots = q[token].astype(np.float64) @ pool[table[seen // C], seen % C].T  # [J, S]
            scores = weights[token].astype(np.float64) @ np.maximum(dots, 0)
            order = np.argsort(-scores, kind="stable")
            gap = scores[order[top_k - 1]] - scores[order[top_k]] if len(order) > top_k else np.inf
            found.append((sorted(order[:top_k].tolist()), float(gap)))
            token += 1
    return found
