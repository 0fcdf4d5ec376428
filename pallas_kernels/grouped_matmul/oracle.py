"""The experts' MLP in NumPy float64, one token and one choice at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul import oracle as products


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


def packed_expert_mlp(
    x: np.ndarray,  # [T, D]
    expert_ids: np.ndarray,  # [T, X]
    expert_weights: np.ndarray,  # [T, X]
    gate: QuantizedWeight,  # [E, F, D]
    up: QuantizedWeight,  # [E, F, D]
    down: QuantizedWeight,  # [E, D, F]
) -> np.ndarray:  # [T, D] float64
    """expert_mlp of experts that are codes; activations are rounded by their form, and between products as x."""
    stacks = [jax.tree.map(np.asarray, stack) for stack in (gate, up, down)]
    out = np.zeros(x.shape, np.float64)
    for expert in np.unique(expert_ids):
        tokens, choices = np.nonzero(expert_ids == expert)
        each = [jax.tree.map(lambda leaf, e=expert: leaf[e], stack) for stack in stacks]
        inner, linear = (products.quantized_matmul(x[tokens], weight) for weight in each[:2])
        hidden = (inner / (1 + np.exp(-inner)) * linear).astype(jnp.dtype(x.dtype))
        given = products.quantized_matmul(hidden, each[2])
        out[tokens] += expert_weights[tokens, choices, None].astype(np.float64) * given  # a token names an expert once
    return out
