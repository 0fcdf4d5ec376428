"""The gated delta rule for a token of one row, as the TPU's kernel of recurrences asks for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def one_row(
    load: Callable[[int], jax.Array],  # of a head: [A, B]
    keep: Callable[[int, jax.Array], None],
    q: jax.Array,  # [K, A]
    k: jax.Array,  # [K, A]
    v: jax.Array,  # [N, B]
    log_decay: jax.Array,  # [1, N] or [N, A]
    beta: jax.Array,  # [1, N]
) -> jax.Array:  # [N, B]
    """o = Sᵀ q of each head; see `math.one_token`. A state has its keys' channels in sublanes."""
    N, K = len(v), len(q)
    queries, keys, decays = q.T, k.T, jnp.exp(log_decay)
    decays = decays if len(decays) == 1 != N else decays.T  # [1, N] or [A, N]
    out = []
    for n in range(N):
        g = n * K // N
        query, key = queries[:, g : g + 1], keys[:, g : g + 1]
        state = load(n) * decays[:, n : n + 1]
        change = (v[n : n + 1] - jnp.sum(state * key, axis=0, keepdims=True)) * beta[:, n : n + 1]
        state = state + key * change
        keep(n, state)
        out.append(jnp.sum(state * query, axis=0, keepdims=True))
    return jnp.concatenate(out)
