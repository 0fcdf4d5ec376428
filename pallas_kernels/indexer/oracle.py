"""An indexer in NumPy float64, one query at a time."""

from collections.abc import Sequence

import numpy as np


def choose(
    q: np.ndarray,  # [T, J, I]
    weights: np.ndarray | None,  # [T, J]; None where each head chooses for itself
    key: np.ndarray,  # [T, I]
    index_keys: np.ndarray,  # [P, C, I], before the step
    rows: Sequence[tuple[np.ndarray, int, int]],  # of each the blocks [M], the first position, and how many
    *,
    top_k: int,
    group: int = 1,
    local: int = 0,
) -> list[list[tuple[list[int], float]]]:
    """The choice of each real token: one for each head that chooses for itself, else one for all heads.

    Positions, ascending, and how far the score of the last group is from the next, infinite where all are chosen.
    """
    C, pool = index_keys.shape[1], index_keys.astype(np.float64)
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
            if weights is not None:
                dots = weights[token].astype(np.float64)[None] @ np.maximum(dots, 0)
            found.append([_best(scores, top_k // group, group, local) for scores in dots])
            token += 1
    return found


def _best(scores: np.ndarray, num_chosen: int, group: int, local: int) -> tuple[list[int], float]:
    """The positions of the best groups of those that a query sees, and the distance to the next."""
    stretches = [scores[i : i + group] for i in range(0, len(scores), group)]
    best = np.array([stretch.max() for stretch in stretches])
    best[max(len(best) - local, 0) :] = np.inf
    order = np.argsort(-best, kind="stable")
    gap = best[order[num_chosen - 1]] - best[order[num_chosen]] if len(order) > num_chosen else np.inf
    chosen = [np.arange(i * group, i * group + len(stretches[i])) for i in sorted(order[:num_chosen])]
    return np.concatenate(chosen).tolist(), float(gap)
