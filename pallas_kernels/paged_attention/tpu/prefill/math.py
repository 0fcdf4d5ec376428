"""The arithmetic of the TPU prefill kernel: values in, values out, no memory."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_batch import oldest_seen

HIDDEN = -1e30  # finite: the difference of two is 0, not NaN
LANES = 128


def dot_keys(q: jax.Array, k: jax.Array) -> jax.Array:  # [rows, H], [keys, H] -> [rows, keys] float32
    """q k^T, summed in float32; float32 operands in full precision."""
    return _dot(q, k, (1, 1))


def dot_values(weights: jax.Array, v: jax.Array) -> jax.Array:  # [rows, keys], [keys, H] -> [rows, H] float32
    """weights v, summed in float32; float32 operands in full precision."""
    return _dot(weights, v, (1, 0))


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def softmax_step(
    logits: jax.Array,  # [rows, keys] float32, in units of log2
    tops: jax.Array,  # [rows, 128] float32, their maximum over parts of 128 keys
    highest: jax.Array,  # [rows, 128] float32, all lanes alike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """weights [rows, keys], the raised maximum [rows, 128], and [rows, 128] by which earlier sums are to be scaled.

    Source: Milakov and Gimelshein 2018 (online softmax).
    """
    raised = jnp.maximum(highest, jnp.max(tops, axis=1, keepdims=True))
    weights = jnp.exp2(logits - repeat_lanes(raised, logits.shape[1]))
    return weights, raised, jnp.exp2(highest - raised)


def fold_lanes(x: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:  # -> [rows, 128]
    """The n parts of 128 lanes of x, [rows, n * 128], joined."""
    return functools.reduce(join, [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)])


def repeat_lanes(x: jax.Array, lanes: int) -> jax.Array:  # [rows, 128], all lanes alike -> [rows, lanes]
    """x with more lanes, all alike."""
    return x if lanes == LANES else jnp.concatenate([x] * (lanes // LANES), axis=1)


def visible(
    shape: tuple[int, int],  # [queries, keys]
    *,
    first_query: jax.Array,  # position
    first_key: jax.Array,  # position
    end_position: jax.Array,
    window: int | None,
    chunked: bool,
    causal: bool,
    ends: jax.Array | None = None,  # [queries, 128] int32, lanes alike
) -> jax.Array:  # bool
    """Which query sees which key. ends: it sees those before this position too.

    causal     keys ->         window of 2      chunks of 2      not causal
    queries    # . . .         # . . .          # . . .          # # # .
      |        # # . .         # # . .          # # . .          # # # .
      v        # # # .         . # # .          . . # .          # # # .  (the last key is beyond the context)
    """
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    query = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    ahead = key - query  # of the query, less first_query - first_key
    seen = ahead <= first_query - first_key if causal else key < end_position - first_key
    if ends is not None:
        seen |= key < repeat_lanes(ends, shape[1]) - first_key
    if window is None:
        return seen
    if not chunked:
        return seen & (ahead > first_query - first_key - window)
    position = first_query + jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0)
    return seen & (key >= oldest_seen(position, window=window, chunked=True) - first_key)


def halves(words: jax.Array, dtype: jnp.dtype | str) -> tuple[jax.Array, jax.Array]:  # [n, H] uint32 -> two [n, H]
    """The two bfloat16 vectors whose elements share each word, low half first, as dtype."""
    low = pltpu.bitcast(words << 16, jnp.float32)
    high = pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return low.astype(dtype), high.astype(dtype)
