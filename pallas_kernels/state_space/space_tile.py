"""Mamba2's rule on a TPU: a token of a row, and a tile of one row's tokens, each stage over all heads.

The equations are `math`'s.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.row_recurrence.heads_tile import HeadsTile, TileDecays

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


def one_tile(tile: HeadsTile) -> None:
    """L tokens of H heads; a state is [B, A]."""
    H, K, dot = tile.num_heads, tile.num_groups, tile.dot
    reads, writes = ([of(g) for g in range(K)] for of in tile.shared)  # [L, A] each
    decays = TileDecays.of(tile.of_heads[0])
    group, heads = [n * K // H for n in range(H)], range(H)
    pairs = [dot(c, b, (1, 1)) for c, b in zip(reads, writes, strict=True)]  # [L, L]
    values = [tile.value(n) for n in heads]
    before = [dot(reads[group[n]], tile.load(n), (1, 1)) for n in heads]
    for n in heads:
        seen = dot(pairs[group[n]] * decays.between(n), values[n], (1, 0))
        tile.say(n, decays.since[:, n : n + 1] * before[n] + seen)
    for n in heads:
        kept = dot(decays.until[:, n : n + 1] * values[n], writes[group[n]], (0, 0))
        tile.keep(n, tile.load(n) * decays.whole[:, n : n + 1] + kept)
