"""Hyper-connections: what a half of a layer is given of a token's residuals, and what each of them gets of its output.

    m = W flat(x) / rms(x)    given = sum_s (sigmoid(a m_s + b_s) + eps) x_s
    x_s' = x_s + (magnitude * sigmoid(a' m'_s + b'_s) + eps) out

All S streams of a token begin as its embedding; behind the last layer they are summed as for another half.
Source: Zhu et al. 2024 (Hyper-Connections); Tencent 2026 (Hy4), where no stream mixes with another.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.linear import project, random_weight
from ferrum_jax.models.spec import NormSpec, StreamsSpec


class StreamSum(nnx.Module):
    """The weighted sum of S streams, with float32 weights and sums in every dtype. mix [S, S D], base [S], scale [1].

    num_kinds: of weights for which mix, base and scale have rows; the sum takes the first.
    """

    num_kinds = 1

    def __init__(self, own: StreamsSpec, hidden_size: int, norm: NormSpec, *, rngs: nnx.Rngs | None) -> None:
        S, kinds = own.num_streams, self.num_kinds
        self.own, self.norm_eps = own, norm.eps
        self.mix = random_weight((kinds * S, S * hidden_size), jnp.dtype(jnp.float32), rngs)
        self.base = nnx.Param(jnp.zeros((kinds * S,), jnp.float32))
        self.scale = nnx.Param(jnp.ones((kinds,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, S, D] -> [T, D]
        return self.summed(x, self.shares(x)[:, 0])

    def shares(self, x: jax.Array) -> jax.Array:  # [T, S, D] -> [T, kinds, S] float32, from 0 to 1
        """The sigmoids of the streams' weights, of each kind."""
        flat = x.astype(jnp.float32).reshape(len(x), -1)
        unit = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + self.norm_eps)
        mixed = (project(flat, self.mix[...]) * unit).reshape(len(x), self.num_kinds, -1)
        return jax.nn.sigmoid(mixed * self.scale[...][None, :, None] + self.base[...].reshape(1, self.num_kinds, -1))

    def summed(self, x: jax.Array, shares: jax.Array) -> jax.Array:  # [T, S, D], [T, S] -> [T, D]
        """The streams with their weights."""
        return jnp.sum((shares + self.own.eps)[..., None] * x.astype(jnp.float32), axis=1).astype(x.dtype)


class HyperConnection(StreamSum):
    """Around a half of a layer. mix [2 S, S D], base [2 S] and scale [2]: of what it is given, and of what it gives."""

    num_kinds = 2

    def given(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:  # [T, S, D] -> [T, D], [T, S]
        """The half's input, and the weights with which the streams take its output."""
        shares = self.shares(x)
        return self.summed(x, shares[:, 0]), self.own.magnitude * shares[:, 1] + self.own.eps

    @staticmethod
    def added(x: jax.Array, out: jax.Array, weights: jax.Array) -> jax.Array:  # [T, S, D], [T, D], [T, S] -> [T, S, D]
        """The streams with what the half gives."""
        wide = weights[..., None] * out.astype(jnp.float32)[:, None]
        return (x.astype(jnp.float32) + wide).astype(x.dtype)
