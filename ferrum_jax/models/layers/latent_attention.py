"""Latent attention: all heads' keys and values are made of one vector a token, and that is what the cache keeps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.layers.attention import KeysAndValues, LayerContext
from ferrum_jax.models.layers.indexer import Indexer
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.norm import RMSNorm
from ferrum_jax.models.layers.rope import LearnedTemperature, Rotation
from ferrum_jax.models.spec import ModelSpec
from pallas_kernels.quantized_matmul import QuantizedWeight, decode


class LatentAttention(nnx.Module):
    """N heads of A values that do not turn and H that do; values of V; a latent c of C values a token.

        c = norm(W_c x)    r = turned(W_r x)    k = (W_UK c, r)    v = W_UV c

    A query is brought to the latent's side once, and a head's result from it: q k = (W_UKᵀ q) c + q r, and what the
    softmax weighs is c itself. So nothing of the context is expanded, one token or many: there is one KV head, whose K
    is (c, r) and whose V is c. With an indexer it attends to the keys that this chose, or the last one before it. A
    layer that borrows attends to the latents of its lender. With a gate, each head of q brings as many more values as V
    has, its own; other gates are a projection of x, one for each head or each of its values. On a mesh a device has
    some of the heads, and every latent whole.
    Source: DeepSeek-AI 2024 (DeepSeek-V2, section 2.1.2 and appendix C).
    """

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        own, D = spec.attention_of(layer), spec.hidden_size
        assert own.latent is not None and own.qk_norm is None, "no layer computes this"
        N, A, H, V = own.num_attention_heads, own.latent.qk_nope_head_dim, own.head_dim, own.value_dim
        C, rank = own.latent.kv_lora_rank, own.latent.q_lora_rank
        self.scale = own.scale
        self.window, self.soft_cap = spec.window_of(layer), own.attn_logit_softcapping
        self.key_dim, self.value_dim = A, V
        self.has_gate, self.raw_queries = own.gate, own.latent.raw_queries
        self.shared_dim, self.latent_dim, self.turning_dim = H, C, H * own.latent.shared_key
        self.query_dim = A + self.turning_dim + V * self.has_gate
        self.query_factor, self.latent_factor = 1.0, (D / C) ** 0.5 if own.latent.rooted else 1.0
        if rank is None:
            self.q = Linear(D, N * self.query_dim, dtype=dtype, rngs=rngs)
        else:
            self.q_a = Linear(D, rank, bias=own.bias, dtype=dtype, rngs=rngs)
            self.query_factor = (D / rank) ** 0.5 if own.latent.rooted else 1.0
            self.q_a_norm = RMSNorm(rank, eps=own.latent.norm_eps, dtype=dtype)
            self.q_b = Linear(rank * (1 + self.raw_queries), N * self.query_dim, dtype=dtype, rngs=rngs)
        self.has_query_latent = rank is not None
        self.chooses = own.indexer is not None
        indexer = None if own.indexer is None or own.indexer.shared else own.indexer
        self.indexer = None if indexer is None else Indexer(indexer, D, rank or D, dtype=dtype, rngs=rngs)
        assert not (own.gate and own.learned_temperature), "no layer computes this"
        self.temperature = LearnedTemperature(N, dtype=dtype) if own.learned_temperature else None
        self.lends, borrows = layer in dict(spec.borrowed).values(), spec.lender_of(layer) != layer
        width = C + self.turning_dim
        self.kv_a = None if borrows else Linear(D, width, bias=own.bias, dtype=dtype, rngs=rngs)
        self.kv_a_norm = None if borrows else RMSNorm(C, eps=own.latent.norm_eps, dtype=dtype)
        has_norm = own.latent.shared_norm and not borrows
        self.shared_norm = RMSNorm(H, eps=own.latent.norm_eps, dtype=dtype) if has_norm else None
        self.kv_b = Linear(C, N * (A + V), dtype=dtype, rngs=rngs)
        gates = N * (V if own.value_gate else 1)
        self.gate_heads = Linear(D, gates, dtype=dtype, rngs=rngs) if own.head_gate or own.value_gate else None
        self.sinks = nnx.Param(jnp.zeros((N,), dtype)) if own.sinks else None
        self.o = Linear(N * V, D, bias=own.output_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: Rotation,
        context: LayerContext,
    ) -> jax.Array:  # [T, D]
        T, A = len(x), self.key_dim
        of_keys, of_values = self._absorbed(x.dtype)
        made_of, q = self._queries(x, rotation)
        if self.indexer is not None:
            context.chosen = self.indexer(x, made_of, rotation, context)
        q, turning, gate = jnp.split(q, [A, A + self.turning_dim], axis=-1)  # without a gate that is empty
        queries = (
            jnp.einsum("tna,nac->tnc", rotation.weighed(q), of_keys),  # [T, N, C]
            self._shared_part(turning, rotation.of_queries),  # [T, N, H]
        )
        attended = context.attend(
            jnp.concatenate(queries, axis=-1),
            *self._latents(x, rotation, context),
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            is_latent=True,
            chosen=context.chosen if self.chooses else None,
        )  # [T, N, C]
        out = jnp.einsum("tnc,nvc->tnv", attended, of_values)
        out = _gated(out, gate) if self.has_gate else out
        if self.gate_heads is not None:
            gate = self.gate_heads(x).reshape(*out.shape[:2], -1)
            out = out * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(out.dtype)
        return self.o(out.reshape(T, -1), context.shards)

    def _queries(self, x: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
        """The input of queries, and the queries with their gates: [T, N, A + H] or [T, N, A + H + V]."""
        made_of = x
        if self.has_query_latent:
            raw = self.q_a(x)
            made_of = _times(self.q_a_norm(raw), self.query_factor)
            q = self.q_b(jnp.concatenate([made_of, raw], axis=-1) if self.raw_queries else made_of)
        else:
            q = self.q(x)
        q = q.reshape(len(x), -1, self.query_dim)
        return made_of, q if self.temperature is None else self.temperature(q, rotation)

    def _latents(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> KeysAndValues:
        """c [T, 1, C] and r [T, 1, H] of the tokens, or those of the lender."""
        if self.kv_a is None or self.kv_a_norm is None:
            assert context.borrowed is not None, "the layer borrows, and nothing was lent to it"
            return context.borrowed
        latent, shared = jnp.split(self.kv_a(x)[:, None], [self.latent_dim], axis=-1)
        shared = shared if self.shared_norm is None else self.shared_norm(shared)
        kept = _times(self.kv_a_norm(latent), self.latent_factor), self._shared_part(shared, rotation.of_keys)
        if self.lends:
            context.lent = kept
        return kept

    def _shared_part(self, x: jax.Array, turned: Callable[[jax.Array], jax.Array]) -> jax.Array:  # [T, heads, H]
        """The part of keys that all heads share, or zeros."""
        return turned(x) if self.turning_dim else jnp.zeros((*x.shape[:2], self.shared_dim), x.dtype)

    def _absorbed(self, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
        """W_UK [N, A, C] and W_UV [N, V, C] of this device's heads. A form's codes are decoded, x is not rounded."""
        weight = self.kv_b.weight[...]
        dense = _dense(weight, dtype) if isinstance(weight, QuantizedWeight) else weight
        by_head = dense.reshape(-1, self.key_dim + self.value_dim, dense.shape[-1])
        return by_head[:, : self.key_dim], by_head[:, self.key_dim :]


def _gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    """x times the sigmoid of its gate, rounded once."""
    return (x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


def _times(x: jax.Array, factor: float) -> jax.Array:
    """x times a number that is not rounded first."""
    return x if factor == 1 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _dense(weight: QuantizedWeight, dtype: jnp.dtype) -> jax.Array:
    """The dense weight that a form stands for, its inputs in the order of x."""
    found = decode(weight, dtype)
    return found if weight.order is None else found[:, jnp.argsort(weight.order)]
