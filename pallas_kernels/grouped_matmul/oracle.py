"""The experts' MLP in NumPy float64, one token and one choice at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def expert_mlp(
    x: np.ndarray,  # [T, D]
    expert_ids: np.ndarray,  # [T, X]
    expert_weights: np.ndarray,  # [T, X]
    gate: np.ndarray,  # [E, F, D]
    up: np.ndarray,  # [E, F, D]
    down: np.ndarray,  # [E, D, F]
    biases: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,  # [E, F], [E, F], [E, D]
    activation: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda gate, up: gate / (1 + np.exp(-gate)) * up,
) -> np.ndarray:  # [T, D] float64
    """sum over choices of weight * (down activation(gate x, up x)), biases added to each product."""
    x, gate, up, down = (a.astype(np.float64) for a in (x, gate, up, down))
    zeros = (np.zeros(gate.shape[:2]), np.zeros(up.shape[:2]), np.zeros(down.shape[:2]))
    gate_bias, up_bias, down_bias = (a.astype(np.float64) for a in biases or zeros)
    out = np.zeros_like(x)
    for t, (ids, weights) in enumerate(zip(expert_ids, expert_weights.astype(np.float64), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            inner = activation(gate[expert] @ x[t] + gate_bias[expert], up[expert] @ x[t] + up_bias[expert])
            out[t] += weight * (down[expert] @ inner + down_bias[expert])
    return out
