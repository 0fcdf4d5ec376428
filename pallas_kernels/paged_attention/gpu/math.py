"""The softmax of the GPU kernels, on arrays in registers: one lane per query and head, one column per token.

Logits are in base 2. A state is (highest logit, sum of weights, weighted values), the last as parts of the head dim.

Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2022 (its use in tiles).
"""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # finite: the difference of two is 0, not NaN
State = tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]  # [64], [64], parts of [64, .]


def columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[64], one value per lane, in every column."""
    return jax.lax.broadcast_in_dim(x, shape, [0])


def logits(scores: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """In base 2."""
    if soft_cap is None:
        return scores * (scale * LOG2_E)
    return jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2_E)


def weigh(
    highest: jax.Array,  # [64]
    total: jax.Array,  # [64]
    scores: jax.Array,  # [64, T], -inf where hidden
    factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The new highest and total, what is kept of earlier weights, and these tokens' weights, [64, T].

    factor: above 0, of scores that are not logits yet; it is multiplied where the highest is taken off, in one step.
    """
    raised = jnp.maximum(highest, scores.max(axis=1) * factor)
    kept = jnp.exp2(highest - raised)
    weights = jnp.exp2(scores * factor - columns(raised, scores.shape))
    return raised, total * kept + weights.sum(axis=1), kept, weights
