"""The gated delta rule as pure functions of arrays: one token, and a tile of tokens of one row.

A tile solves for U, which its tokens write. With s the running sum of log_decay, D[i, j] = exp(s[i] - s[j]) for j <= i:

    U = (1 + tril(beta k kᵀ * D, -1))⁻¹ beta (v - exp(s) k S)
    o = exp(s) q S + (tril(q kᵀ) * D) U
    S ← exp(s[-1]) S + kᵀ (exp(s[-1] - s) U)

Where each channel of k decays by itself, D stands inside the sum over channels: see `decays`.
q and k have K heads, v has K * G: [K, G, ...]. A tile has L tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta.decays import decays_of, dot


def one_token(
    state: jax.Array,  # [R, K, G, A, B] float32
    q: jax.Array,  # [R, K, A] float32
    k: jax.Array,  # [R, K, A] float32
    v: jax.Array,  # [R, K, G, B] float32
    log_decay: jax.Array,  # [R, K, G] float32, or [R, K, G, A]
    beta: jax.Array,  # [R, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [R, K, G, B], the state after it
    """A token of each of R rows. Products and sums, not dots, so that few rows cost what reading their states costs."""
    q, k = q[:, :, None, :, None], k[:, :, None, :, None]
    by_channel = log_decay if log_decay.ndim == v.ndim else log_decay[..., None]
    state = state * jnp.exp(by_channel)[..., None]
    change = (v - jnp.sum(state * k, axis=-2)) * beta[..., None]
    state = state + k * change[..., None, :]
    return jnp.sum(state * q, axis=-2), state


def one_tile(
    state: jax.Array,  # [K, G, A, B] float32
    q: jax.Array,  # [L, K, A] float32; 0 for tokens that are not the row's, as in all that follow
    k: jax.Array,  # [L, K, A] float32
    v: jax.Array,  # [L, K, G, B] float32
    log_decay: jax.Array,  # [L, K, G] float32, or [L, K, G, A]
    beta: jax.Array,  # [L, K, G] float32
) -> tuple[jax.Array, jax.Array]:  # out [L, K, G, B], the state after the tile
    """L neighbouring tokens of one row."""
    decays = decays_of(k, log_decay)
    wanted = beta[..., None] * (v - decays.read(k, state))
    written = jax.lax.linalg.triangular_solve(
        decays.pairs(k) * jnp.moveaxis(beta, 0, -1)[..., None],
        jnp.moveaxis(wanted, 0, 2),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )  # [K, G, L, B]; reads nothing of the system on and above its diagonal
    out = decays.read(q, state) + dot("kgij,kgjb->ikgb", decays.pairs(q), written)
    return out, decays.kept(state, jnp.moveaxis(written, 2, 0))
