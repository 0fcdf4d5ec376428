"""Attention of a text model's tokens to the states of an encoder, whose keys and values are made once for a clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import LayerContext
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.rope import Rotation
from ferrum_jax.models.spec import ModelSpec


class CrossAttention(nnx.Module):
    """q from the tokens, and the output projection; on a mesh a device has some of the heads.

    Source: Vaswani et al. 2017, section 3.2.3.
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = spec.attention_of(layer), spec.hidden_size
        width = own.num_attention_heads * own.head_dim
        self.head_dim, self.scale = own.head_dim, own.scale
        self.q = Linear(D, width, bias=own.bias, dtype=dtype, rngs=rngs)
        self.o = Linear(width, D, bias=own.output_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: Rotation,  # whose positions say nothing about a clip's
        context: LayerContext,
    ) -> jax.Array:  # [T, D]
        q = self.q(x).reshape(len(x), -1, self.head_dim)
        return self.o(context.across(q, scale=self.scale).reshape(len(x), -1), context.shards)
