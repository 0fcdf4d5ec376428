"""causal_conv in plain XLA: W shifted copies of x, whose first rows' tokens are replaced by what the state keeps.

W = 4, a row of tokens a b c after inputs p q r:      shift 3   p q r
                                                      shift 2   q r a
                                                      shift 1   r a b
                                                      shift 0   a b c
"""

import jax
import jax.numpy as jnp

from pallas_kernels.state_rows import StateRows


def causal_conv(
    x: jax.Array,  # [T, I]
    weight: jax.Array,  # [I, W]
    pool: jax.Array,  # [slots, W - 1, I]
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """See the package's causal_conv."""
    W = weight.shape[1]
    kept = pool.at[rows.slots].get(mode="promise_in_bounds")  # [R, W - 1, I]
    kept = jnp.where((rows.starts == 0)[:, None, None], jnp.zeros_like(kept), kept)
    kept = jax.lax.optimization_barrier(kept)  # else XLA reads the pool again after it is written, and copies it
    total = jnp.zeros(x.shape, jnp.float32)
    for w in range(W):
        inputs = _shifted(x, kept.astype(x.dtype), rows, W - 1 - w)
        total += inputs.astype(jnp.float32) * weight[:, w].astype(jnp.float32)[None]
    last = _last_inputs(x, kept, rows)
    return total.astype(x.dtype), pool.at[rows.targets].set(last, mode="promise_in_bounds")


def _shifted(x: jax.Array, kept: jax.Array, rows: StateRows, shift: int) -> jax.Array:  # [T, I]
    """The input `shift` tokens before each token of a row."""
    if shift == 0:
        return x
    shifted = jnp.pad(x, ((shift, 0), (0, 0)))[: len(x)]
    places = jnp.arange(shift)[None]  # [1, shift], of a row's first tokens
    tokens = jnp.where(places < rows.counts[:, None], rows.offsets[:, None] + places, len(x))  # [R, shift]
    return shifted.at[tokens].set(kept[:, kept.shape[1] - shift :], mode="drop")


def _last_inputs(x: jax.Array, kept: jax.Array, rows: StateRows) -> jax.Array:  # [R, W - 1, I]
    """Each row's last W - 1 inputs after the step; where it has fewer here, its earlier ones moved up."""
    places = rows.counts[:, None] - kept.shape[1] + jnp.arange(kept.shape[1])[None]  # [R, W - 1], of tokens here
    here = x.at[rows.offsets[:, None] + places].get(mode="clip").astype(kept.dtype)
    before = jnp.take_along_axis(kept, jnp.clip(places + kept.shape[1], 0, kept.shape[1] - 1)[..., None], axis=1)
    return jnp.where((places >= 0)[..., None], here, before)
