"""The experts' MLP in NumPy float64, one token and one choice at a time."""

from __future__ import annotations

import numpy as np


def expert_mlp(
    x: np.ndarray,  # [T, D]
    expert_ids: np.ndarray,  # [T, X]
    expert_weights: np.ndarray,  # [T, X]
    gate: np.ndarray,  # [E, F, D]
    up: np.ndarray,  # [E, F, D]
    down: np.ndarray,  # [E, D, F]
) -> np.ndarray:  # [T, D] float64
    """sum over choices of weight * down (silu(gate x) * up x)."""
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    out = np.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(expert_ids, expert_weights.astype(np.float64), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            inner = gate[expert] @ x[t]
            out[t] += weight * (down[expert] @ (inner / (1 + np.exp(-inner)) * (up[expert] @ x[t])))
    return out
