"""Indexers: what chooses the keys that a layer's attention reads."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import Attention, LayerContext
from ferrum_jax.models.layers.linear import Linear, project
from ferrum_jax.models.layers.norm import LayerNorm, rms_norm_of
from ferrum_jax.models.layers.rope import LearnedTemperature, Rotation
from ferrum_jax.models.spec import IndexerSpec, ModelSpec
from pallas_kernels.chosen_keys import Chosen


class Indexer(nnx.Module):
    """J heads of I values whose queries are made of what attention's are, and one key of I values a token.

    With queries of its own they are made of the token, normed, and weighed by a learned temperature.

        score(t, s) = sum_j w_j(t) relu(q_j(t) k(s));    k = norm(W_k x)    w = W_w x / sqrt(J I)

    The first or last values of queries and keys turn by attention's angles. On a mesh every device has all of it, and
    so the same chosen: with heads apart each layer would sum the scores of all tokens over the devices.
    Source: DeepSeek-AI 2025 (DeepSeek-V3.2, section 2.1).
    """

    def __init__(
        self, own: IndexerSpec, hidden_size: int, query_size: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None
    ) -> None:
        J, self.width = own.num_heads, own.head_dim
        self.top_k, self.interleaved, self.turns_last = own.top_k, own.interleaved, own.turns_last
        self.q_norm = LayerNorm(hidden_size, eps=own.key_norm_eps, dtype=dtype) if own.own_queries else None
        self.temperature = LearnedTemperature(J, dtype=dtype) if own.own_queries else None
        self.q = Linear(hidden_size if own.own_queries else query_size, J * self.width, dtype=dtype, rngs=rngs)
        self.k = Linear(hidden_size, self.width, dtype=dtype, rngs=rngs)
        self.k_norm = LayerNorm(self.width, eps=own.key_norm_eps, dtype=dtype)
        self.weigh = Linear(hidden_size, J, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        made_of: jax.Array,  # [T, what attention's queries are made of]
        rotation: Rotation,
        context: LayerContext,
    ) -> Chosen | None:
        own = dataclasses.replace(rotation, interleaved=self.interleaved)
        q = self.q(made_of if self.q_norm is None else self.q_norm(x)).reshape(len(x), -1, self.width)
        q = self._turned(q if self.temperature is None else self.temperature(q, rotation), own)  # [T, J, I]
        key = self._turned(self.k_norm(self.k(x))[:, None], own)[:, 0]  # [T, I]
        weights = project(x, self.weigh.weight[...], out_dtype=jnp.float32) * (q.shape[1] * self.width) ** -0.5
        return context.choose(q, weights, key, top_k=self.top_k)

    def _turned(self, x: jax.Array, own: Rotation) -> jax.Array:  # [T, heads, I] -> the same
        if not self.turns_last or own.cos is None:
            return own.of_keys(x)
        staying = self.width - 2 * own.cos.shape[-1]
        return jnp.concatenate((x[..., :staying], own.of_keys(x[..., staying:])), axis=-1)


class HeadIndexer(nnx.Module):
    """A head of I values for each KV head, which chooses groups of keys for that one, and one key of I values a token.

        score(t, s) = q(t) k(s);    q = norm(W_q x)    k = norm(W_k x)

    The first values of queries and keys turn by attention's angles. On a mesh a device has the heads of its KV heads,
    and every key.
    Source: MiniMax 2026 (MiniMax-M3).
    """

    def __init__(self, spec: ModelSpec, own: IndexerSpec, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        self.width, self.top_k, self.group, self.local = own.head_dim, own.top_k, own.group_size, own.local_groups
        self.heads = Linear(spec.hidden_size, own.num_heads * self.width, dtype=dtype, rngs=rngs)
        self.k = Linear(spec.hidden_size, self.width, dtype=dtype, rngs=rngs)
        self.q_norm = rms_norm_of(spec.norm, self.width, dtype=dtype)
        self.k_norm = rms_norm_of(spec.norm, self.width, dtype=dtype)

    def __call__(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> Chosen | None:  # x: [T, D]
        q = rotation.of_keys(self.q_norm(self.heads(x).reshape(len(x), -1, self.width)))  # [T, K, I]
        key = rotation.of_keys(self.k_norm(self.k(x))[:, None])[:, 0]  # [T, I]
        return context.choose(q, None, key, top_k=self.top_k, group=self.group, local=self.local)


class IndexedAttention(Attention):
    """Attention whose KV heads read the keys that an indexer chose for each."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        super().__init__(spec, layer, dtype=dtype, rngs=rngs)
        own = spec.attention_of(layer)
        assert own.indexer is not None and own.indexer.by_head and not own.indexer.shared, "no layer computes this"
        assert own.indexer.num_heads == own.num_key_value_heads, "each head chooses for one KV head"
        self.indexer = HeadIndexer(spec, own.indexer, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        context.chosen = self.indexer(x, rotation, context)
        return super().__call__(x, rotation, context)
