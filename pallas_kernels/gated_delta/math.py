"""The gated delta rule as pure functions of arrays: one token, and a tile of tokens of one row.

A tile solves for U, which its tokens write. With s the running sum of log_decay, D[i, j] = exp(s[i] - s[j]) for j <= i:

    U = (1 + tril(beta k kᵀ * D, -1))⁻¹ beta (v - exp(s) k S)
    o = exp(s) q S + (tril(q kᵀ) * D) U
    S ← exp(s[-1]) S + kᵀ (exp(s[-1] - s) U)

q and k have K heads, v has K * G: [K, G, ...]. A tile has L tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def one_token(
    state: jax.Array,  # [R, K, G, A, B] float32
    q: jax.Array,  # [R, K, A] float32
    k: jax.Array,  # [R, K, A] float32
    v: jax.Array,  # [R, K, G, B] float32
    log_decay: jax.Array,  # [R, K, G] float32
    beta: jax.Array,  # [R, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [R, K, G, B], the state after it
    """A token of each of R rows. Products and sums, not dots, so that few rows cost what reading their states costs."""
    q, k = q[:, :, None, :, None], k[:, :, None, :, None]
    state = state * jnp.exp(log_decay)[..., None, None]
    change = (v - jnp.sum(state * k, axis=-2)) * beta[..., None]
    state = state + k * change[..., None, :]
    return jnp.sum(state * q, axis=-2), state


def one_tile(
    state: jax.Array,  # [K, G, A, B] float32
    q: jax.Array,  # [L, K, A] float32; 0 for tokens that are not the row's, as in all that follow
    k: jax.Array,  # [L, K, A] float32
    v: jax.Array,  # [L, K, G, B] float32
    log_decay: jax.Array,  # [L, K, G] float32
    beta: jax.Array,  # [L, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [L, K, G, B], the state after the tile
    """L neighbouring tokens of one row."""

    def dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)

    L = q.shape[0]
    sums = jnp.cumsum(log_decay, axis=0)  # [L, K, G]
    decays = jnp.moveaxis(sums, 0, -1)  # [K, G, L]
    lower = jnp.tril(jnp.ones((L, L), bool))[None, None]
    between = jnp.exp(jnp.where(lower, decays[..., :, None] - decays[..., None, :], -jnp.inf))  # [K, G, L, L]
    since = jnp.exp(sums)[..., None]  # [L, K, G, 1]
    until = jnp.exp(sums[-1:] - sums)[..., None]
    system = dot("ikd,jkd->kij", k, k)[:, None] * between * jnp.moveaxis(beta, 0, -1)[..., None]
    wanted = beta[..., None] * (v - since * dot("lka,kgab->lkgb", k, state))
    written = jax.lax.linalg.triangular_solve(
        system, jnp.moveaxis(wanted, 0, 2), left_side=True, lower=True, unit_diagonal=True
    )  # [K, G, L, B]; reads nothing of `system` on and above its diagonal
    seen = dot("ikd,jkd->kij", q, k)[:, None] * between
    out = since * dot("lka,kgab->lkgb", q, state) + dot("kgij,kgjb->ikgb", seen, written)
    state = state * jnp.exp(decays[..., -1])[..., None, None]
    return out, state + dot("lka,lkgb->kgab", k, until * jnp.moveaxis(written, 2, 0))
