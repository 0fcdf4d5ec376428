"""Mamba2's rule as pure functions of arrays: one token, and a tile of tokens of one row.

With s the running sum of log_decay in a tile, D[i, j] = exp(s[i] - s[j]) for j <= i:

    o = exp(s) c S + (tril(c bᵀ) * D) v
    S ← exp(s[-1]) S + (exp(s[-1] - s) v)ᵀ b

b and c have K groups, v has K * G heads: [K, G, ...]. A tile has L tokens. A state is [B, A], its lanes those of b and
c: A is 128 and more in published models, B is 64, half a TPU's lanes.
"""

import jax
import jax.numpy as jnp


def one_token(
    state: jax.Array,  # [R, K, G, B, A] float32
    c: jax.Array,  # [R, K, A] float32
    b: jax.Array,  # [R, K, A] float32
    v: jax.Array,  # [R, K, G, B] float32
    log_decay: jax.Array,  # [R, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [R, K, G, B], the state after it
    """A token of each of R rows. Products and sums, not dots, so that few rows cost what reading their states costs."""
    c, b = c[:, :, None, None, :], b[:, :, None, None, :]
    state = state * jnp.exp(log_decay)[..., None, None] + v[..., None] * b
    return jnp.sum(state * c, axis=-1), state


def one_tile(
    state: jax.Array,  # [K, G, B, A] float32
    c: jax.Array,  # [L, K, A] float32; 0 for tokens that are not the row's, as in all that follow
    b: jax.Array,  # [L, K, A] float32
    v: jax.Array,  # [L, K, G, B] float32
    log_decay: jax.Array,  # [L, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [L, K, G, B], the state after the tile
    """L neighbouring tokens of one row."""

    def dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)

    L = c.shape[0]
    sums = jnp.cumsum(log_decay, axis=0)  # [L, K, G]
    decays = jnp.moveaxis(sums, 0, -1)  # [K, G, L]
    lower = jnp.tril(jnp.ones((L, L), bool))[None, None]
    between = jnp.exp(jnp.where(lower, decays[..., :, None] - decays[..., None, :], -jnp.inf))  # [K, G, L, L]
    seen = dot("ika,jka->kij", c, b)[:, None] * between
    out = jnp.exp(sums)[..., None] * dot("lka,kgba->lkgb", c, state) + dot("kgij,jkgb->ikgb", seen, v)
    state = state * jnp.exp(decays[..., -1])[..., None, None]
    until = jnp.exp(sums[-1:] - sums)[..., None]
    return out, state + dot("lkgb,lka->kgba", until * v, b)
