"""The gated delta rule as pure functions of arrays: one token, and a tile of tokens of one row.

A tile solves for U, which its tokens write. With s the running sum of log_decay, D[i, j] = exp(s[i] - s[j]) for j <= i:

    U = (1 + tril(beta k kᵀ * D, -1))⁻¹ beta (v - exp(s) k S)
    o = exp(s) q S + (tril(q kᵀ) * D) U
    S ← exp(s[-1]) S + kᵀ (exp(s[-1] - s) U)

Where each channel of k decays by itself, D stands inside the sum over channels. For x queries or keys, u written:

    read(x, S)[i] = (exp(s[i]) * x[i]) S
    pairs(x)[i, j] = sum over channels of exp(s[i] - s[j]) x[i] k[j] for j <= i, else 0
    kept(S, u) = exp(s[-1]) S + sum over j of (exp(s[-1] - s[j]) * k[j]) u[j]ᵀ

exp is given nothing above 0: exp(-s[j]) of a channel that decays by exp(-5) a token leaves float32 after 18 tokens.
What lies between two tokens of one short stretch is summed for each pair, for the difference of two large sums has lost
its last digits. Between stretches it is split where the earlier one ends and where the later one begins.
q and k have K heads, v has K * G: [K, G, ...]. A tile has L tokens.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

_STRETCH = 8  # tokens; a tile of 64 then has as many exponents within stretches as between them


def decays_of(k: jax.Array, log_decay: jax.Array) -> HeadDecays | ChannelDecays:
    """k: [L, K, A]. log_decay: [L, K, G], of heads, or [L, K, G, A], of channels."""
    if log_decay.ndim == k.ndim:
        return HeadDecays(k=k, sums=jnp.cumsum(log_decay, axis=0))
    by_stretch = log_decay.reshape(-1, math.gcd(len(k), _STRETCH), *log_decay.shape[1:])
    within = jax.vmap(_between)(by_stretch)
    since = jnp.cumsum(by_stretch, axis=1)
    return ChannelDecays(k=k, since=since, within=within, ends=_between(since[:, -1]))


def _between(x: jax.Array) -> jax.Array:  # [n, ...] -> [n, n, ...]
    """[i, j]: the sum of x[j + 1], ..., x[i]."""
    later = jnp.tril(jnp.ones((len(x), len(x)), bool), -1).reshape(len(x), len(x), *(1,) * (x.ndim - 1))
    return jnp.cumsum(jnp.where(later, x[:, None], jnp.zeros_like(x[:, None])), axis=0)


def dot(subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The products of float32, not rounded to what an accelerator multiplies fastest."""
    return jnp.einsum(subscripts, x, y, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadDecays:
    """sums: [L, K, G], of log_decay."""

    k: jax.Array
    sums: jax.Array

    def read(self, x: jax.Array, state: jax.Array) -> jax.Array:  # [L, K, A], [K, G, A, B] -> [L, K, G, B]
        return jnp.exp(self.sums)[..., None] * dot("lka,kgab->lkgb", x, state)

    def pairs(self, x: jax.Array) -> jax.Array:  # [L, K, A] -> [K, G, L, L]
        sums = jnp.moveaxis(self.sums, 0, -1)  # [K, G, L]
        lower = jnp.tril(jnp.ones((len(x), len(x)), bool))[None, None]
        between = jnp.exp(jnp.where(lower, sums[..., :, None] - sums[..., None, :], -jnp.inf))
        return dot("ika,jka->kij", x, self.k)[:, None] * between

    def kept(self, state: jax.Array, written: jax.Array) -> jax.Array:  # [K, G, A, B], [L, K, G, B] -> [K, G, A, B]
        until = jnp.exp(self.sums[-1:] - self.sums)[..., None]
        return state * jnp.exp(self.sums[-1])[..., None, None] + dot("lka,lkgb->kgab", self.k, until * written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelDecays:
    """n stretches of M tokens. since: [n, M, K, G, A], sums of log_decay from the begin of each to its tokens.

    within: [n, M, M, K, G, A], those behind a token up to another of its stretch. ends: [n, n, K, G, A], those behind
    the end of a stretch up to the end of another.
    """

    k: jax.Array
    since: jax.Array
    within: jax.Array
    ends: jax.Array

    def read(self, x: jax.Array, state: jax.Array) -> jax.Array:  # [L, K, A], [K, G, A, B] -> [L, K, G, B]
        begins = _shifted(jnp.cumsum(self.since[:, -1], axis=0))  # [n, K, G, A]
        given = self._cut(x) * jnp.exp(begins[:, None] + self.since)
        return dot("lkga,kgab->lkgb", given.reshape(len(x), *given.shape[2:]), state)

    def pairs(self, x: jax.Array) -> jax.Array:  # [L, K, A] -> [K, G, L, L]
        num = len(self.since)
        earlier = jnp.tril(jnp.ones((num, num), bool), -1)[:, :, None, None, None, None]
        gaps = _shifted(self.ends)[:, :, None] + self.within[None, :, -1]  # [n, n, M, K, G, A]
        keys = self._cut(self.k)[None] * jnp.exp(jnp.where(earlier, gaps, -jnp.inf))
        others = dot("aikgd,abjkgd->kgaibj", self._cut(x) * jnp.exp(self.since), keys)
        own = jnp.sum(self._cut(x)[:, :, None] * self._cut(self.k)[:, None] * jnp.exp(self.within), axis=-1)
        # its place among the others by a product: XLA would compute it again for each place of a broadcast
        found = others + dot("aijkg,ab->kgaibj", own, jnp.eye(num))
        return jnp.tril(found.reshape(*found.shape[:2], *x.shape[:1] * 2))

    def kept(self, state: jax.Array, written: jax.Array) -> jax.Array:  # [K, G, A, B], [L, K, G, B] -> [K, G, A, B]
        keys = self._cut(self.k) * jnp.exp(self.ends[-1][:, None] + self.within[:, -1])
        whole = jnp.exp(jnp.sum(self.since[:, -1], axis=0))[..., None]
        return state * whole + dot("lkga,lkgb->kgab", keys.reshape(len(written), *keys.shape[2:]), written)

    def _cut(self, x: jax.Array) -> jax.Array:  # [L, K, A] -> [n, M, K, 1, A]
        return x.reshape(*self.since.shape[:2], x.shape[1], 1, x.shape[2])


def _shifted(x: jax.Array) -> jax.Array:
    """The entries one place further on: zeros first, and without the last."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


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
