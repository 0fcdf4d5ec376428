"""A layer of an image or sound encoder: attention both ways and an MLP, each behind a norm and before a residual."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.layers.segment_attention import attention_of_tiles, map_tiles, num_real_tiles
from ferrum_jax.models.spec import SoundSpec, VisionSpec


class BidirectionalLayer(nnx.Module):
    """LayerNorms, an MLP without a gate, and biases.

    fused: q, k and v are one product. key_bias: whether the product of keys has a bias, as all others have.
    """

    def __init__(
        self,
        spec: VisionSpec | SoundSpec,
        *,
        eps: float,
        fused: bool = False,
        key_bias: bool = True,
        dtype: jnp.dtype,
    ) -> None:
        D, F = spec.hidden_size, spec.intermediate_size
        self.num_heads, self.fused, self.act = spec.num_heads, fused, activation_of(spec.hidden_act)
        self.attention_norm = LayerNorm(D, eps=eps, dtype=dtype)
        if fused:
            self.qkv = Linear(D, 3 * D, bias=True, dtype=dtype, rngs=None)
        else:
            self.q, self.v = (Linear(D, D, bias=True, dtype=dtype, rngs=None) for _ in range(2))
            self.k = Linear(D, D, bias=key_bias, dtype=dtype, rngs=None)
        self.o = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.mlp_norm = LayerNorm(D, eps=eps, dtype=dtype)
        self.up = Linear(D, F, bias=True, dtype=dtype, rngs=None)
        self.down = Linear(F, D, bias=True, dtype=dtype, rngs=None)

    def heads(self, x: jax.Array) -> tuple[jax.Array, ...]:  # [t, D] -> q, k, v [t, N, H]
        normed = self.attention_norm(x)
        parts = jnp.split(self.qkv(normed), 3, -1) if self.fused else (self.q(normed), self.k(normed), self.v(normed))
        return tuple(part.reshape(len(x), self.num_heads, -1) for part in parts)

    def mixed(self, x: jax.Array, attended: jax.Array) -> jax.Array:  # [t, D], [t, N, H] -> [t, D]
        x = x + self.o(attended.reshape(x.shape))
        return x + self.down(self.act(self.up(self.mlp_norm(x))))


def in_real_tiles(
    heads: Callable[..., tuple[jax.Array, ...]],  # of x and turns: q, k, v [N, t, H]
    mixed: Callable[[jax.Array, jax.Array], jax.Array],
    x: jax.Array,  # [tiles, t, D]
    segments: jax.Array,  # [tiles, t]
    *turns: jax.Array,  # [tiles, t, ..] each
) -> jax.Array:  # [tiles, t, D]
    """A layer's output, computed tile by tile; tiles of padding are not."""
    count = num_real_tiles(segments)
    q, k, v = map_tiles(heads, count, x, *turns)
    return map_tiles(mixed, count, x, attention_of_tiles(q, k, v, segments))


def heads_first(heads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:  # [t, N, H] each -> [N, t, H]
    return tuple(jnp.swapaxes(a, 0, 1) for a in heads)
