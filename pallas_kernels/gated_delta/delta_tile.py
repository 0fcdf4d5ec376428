"""The gated delta rule on a TPU: a token of a row, and a tile of one row's tokens, where each head decays as a whole.

The equations are `math`'s. The triangular system of a head is solved in blocks of 16 tokens: the inverses of its
diagonal blocks are substituted forward, those of all heads at once, two heads beside each other in the lanes; what is
below them are products. Each stage runs over all heads before the next, or each would wait for the matrix unit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.row_recurrence.heads_tile import BLOCK, HeadsTile, TileDecays

_SUBLANES = 8


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


def one_tile(tile: HeadsTile) -> None:
    """L tokens of H heads."""
    L, H, K, dot = tile.num_tokens, tile.num_heads, tile.num_groups, tile.dot
    log_decay, beta = tile.of_heads  # [L, H]
    queries, keys = ([read(g) for g in range(K)] for read in tile.shared)
    group = [n * K // H for n in range(H)]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (L, L), axis) for axis in (0, 1))
    decays = TileDecays.of(log_decay)
    both = [jnp.concatenate([key, query]) for key, query in zip(keys, queries, strict=True)]  # [2 L, A]
    pairs = [dot(x, key, (1, 1)) for x, key in zip(both, keys, strict=True)]  # [2 L, L]
    between = [decays.between(n) for n in range(H)]
    systems = [jnp.where(row > column, pairs[group[n]][:L] * between[n], 0.0) * beta[:, n : n + 1] for n in range(H)]
    read = [dot(both[group[n]], tile.load(n), (1, 0)) for n in range(H)]  # [2 L, B]
    wanted = [beta[:, n : n + 1] * (tile.value(n) - decays.since[:, n : n + 1] * read[n][:L]) for n in range(H)]
    written = _solve(systems, wanted, dot)
    for n in range(H):
        seen = dot(pairs[group[n]][L:] * between[n], written[n], (1, 0))
        tile.say(n, decays.since[:, n : n + 1] * read[n][L:] + seen)
    for n in range(H):
        kept = dot(keys[group[n]], decays.until[:, n : n + 1] * written[n], (0, 0))
        tile.keep(n, tile.load(n) * decays.whole[:, n : n + 1] + kept)


def _solve(systems: list[jax.Array], wanted: list[jax.Array], dot: Callable[..., jax.Array]) -> list[jax.Array]:
    """x of (1 + system) x = wanted of each head; a system [L, L] has zeros on and above its diagonal."""
    L = len(systems[0])
    inverses = _inverses(systems)
    found: list[list[jax.Array]] = [[] for _ in systems]
    for first in range(0, L, BLOCK):
        own = slice(first, first + BLOCK)
        left = [
            want[own] - dot(system[own, :first], jnp.concatenate(x), (1, 0)) if first else want[own]
            for system, want, x in zip(systems, wanted, found, strict=True)
        ]
        for x, inverse, want in zip(found, inverses, left, strict=True):
            x.append(dot(inverse[:, own], want, (1, 0)))
    return [jnp.concatenate(x) for x in found]


def _inverses(systems: list[jax.Array]) -> list[jax.Array]:
    """[16, L] each: the inverses of a system's diagonal blocks, beside each other."""
    L, H = len(systems[0]), len(systems)
    beside = [jnp.concatenate([systems[n], systems[min(n + 1, H - 1)]], axis=1) for n in range(0, H, 2)]  # [L, 2 L]
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (BLOCK, 2 * L), axis) for axis in (0, 1))
    blocks = []
    for system in beside:
        block = system[:BLOCK]
        for first in range(BLOCK, L, BLOCK):
            block = jnp.where(lane % L // BLOCK == first // BLOCK, system[first : first + BLOCK], block)
        blocks.append(block)
    found = [jnp.where(lane % BLOCK == row, 1.0, 0.0) for _ in blocks]
    for m in range(BLOCK - 1):
        at = (m + 1) // _SUBLANES * _SUBLANES  # rows above it are done
        places, below = (lane - lane % BLOCK + m)[at:], row[at:] > m
        for i, (block, x) in enumerate(zip(blocks, found, strict=True)):
            factor = jnp.where(below, jnp.take_along_axis(block[at:], places, axis=1), 0.0)
            changed = x[at:] - factor * x[m : m + 1]
            found[i] = jnp.concatenate([x[:at], changed]) if at else changed
    return [found[n // 2][:, n % 2 * L : (n % 2 + 1) * L] for n in range(H)]
