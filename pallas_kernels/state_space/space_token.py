"""Mamba2's rule for a token of one row, as the TPU's kernel of recurrences asks for it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_LANES = 128


def one_row(
    load: Callable[[int], jax.Array],  # of a head: [B, A]
    keep: Callable[[int, jax.Array], None],
    c: jax.Array,  # [K, A]
    b: jax.Array,  # [K, A]
    v: jax.Array,  # [N, B]
    log_decay: jax.Array,  # [1, N]
) -> jax.Array:  # [N, B]
    """o = S c of each head; see `math.one_token`.

    A sum over lanes would wait for each of its vectors. Transposed, it is a sum of vectors, of the two heads that fill
    the lanes where B is half of them.
    """
    (N, B), K = v.shape, len(c)
    values, decays = v.T, jnp.exp(log_decay)  # [B, N], [1, N]

    def products(n: int) -> jax.Array:  # [B, A]: their sums over A are o
        g = n * K // N
        state = load(n) * decays[:, n : n + 1] + values[:, n : n + 1] * b[g : g + 1]
        keep(n, state)
        return state * c[g : g + 1]

    beside = 2 if 2 * B == _LANES and N % 2 == 0 else 1
    each = N // beside
    out = [
        jnp.sum(jnp.concatenate([products(n + i * each) for i in range(beside)]).T, axis=0, keepdims=True)
        for n in range(each)
    ]
    both = jnp.concatenate(out)  # [N / beside, beside * B]
    return jnp.concatenate([both[:, i * B : (i + 1) * B] for i in range(beside)])
