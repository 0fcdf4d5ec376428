"""The demo model while it is trained: a Qwen3-MoE decoder in flax.nnx, whole sequences at once, float32.

Weights have Hugging Face's names and layout ([out, in]) except that a layer's experts are stacked, [E, out, in].
The experts run at a fixed capacity, sorted by choice; what overflows is dropped in training, never when measured.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of the model, by Hugging Face's names in `config()`; the letters are those of the project."""

    V: int = 4096
    D: int = 256
    L: int = 4
    N: int = 4
    K: int = 2
    H: int = 64
    E: int = 8
    X: int = 2
    F: int = 128
    max_length: int = 2048
    rope_theta: float = 10000.0
    eps: float = 1e-6

    def config(self) -> dict[str, object]:
        """The `config.json` of Qwen3MoeForCausalLM with these sizes."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "eos_token_id": 0,
            "head_dim": self.H,
            "hidden_act": "silu",
            "hidden_size": self.D,
            "initializer_range": 0.02,
            "intermediate_size": self.F * self.X,
            "max_position_embeddings": self.max_length,
            "max_window_layers": self.L,
            "mlp_only_layers": [],
            "moe_intermediate_size": self.F,
            "norm_topk_prob": True,
            "num_attention_heads": self.N,
            "num_experts": self.E,
            "num_experts_per_tok": self.X,
            "num_hidden_layers": self.L,
            "num_key_value_heads": self.K,
            "output_router_logits": False,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "router_aux_loss_coef": 0.01,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.V,
        }


def normal(random: np.random.Generator, scale: float, *size: int) -> nnx.Param:
    """A weight drawn from a normal distribution of deviation `scale`."""
    return nnx.Param(jnp.asarray(random.standard_normal(size, np.float32) * np.float32(scale)))


class Norm(nnx.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.asarray(np.ones(size, np.float32)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weight[...]


class Linear(nnx.Module):
    """x @ weight.T, the weight [out, in]."""

    def __init__(self, out: int, size: int, scale: float, random: np.random.Generator) -> None:
        self.weight = normal(random, scale / math.sqrt(size), out, size)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight[...].T


class Attention(nnx.Module):
    """Causal grouped-query attention with normed and rotated queries and keys; x: [B, S, D]."""

    def __init__(self, shape: Shape, random: np.random.Generator) -> None:
        self.shape = shape
        self.q_proj = Linear(shape.N * shape.H, shape.D, 1.0, random)
        self.k_proj = Linear(shape.K * shape.H, shape.D, 1.0, random)
        self.v_proj = Linear(shape.K * shape.H, shape.D, 1.0, random)
        self.o_proj = Linear(shape.D, shape.N * shape.H, 0.3, random)
        self.q_norm = Norm(shape.H, shape.eps)
        self.k_norm = Norm(shape.H, shape.eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        K, H, G = self.shape.K, self.shape.H, self.shape.N // self.shape.K
        B, S, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).reshape(B, S, K * G, H)), self.shape.rope_theta)
        k = rotate(self.k_norm(self.k_proj(x).reshape(B, S, K, H)), self.shape.rope_theta)
        v = self.v_proj(x).reshape(B, S, K, H).transpose(0, 2, 1, 3).reshape(B * K, S, H)
        q = q.reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G * S, H)
        k = k.transpose(0, 2, 1, 3).reshape(B * K, S, H)
        scores = jnp.einsum("bqh,bsh->bqs", q, k) / math.sqrt(H)
        visible = jnp.tile(jnp.tril(jnp.ones((S, S), bool)), (G, 1))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        out = jnp.einsum("bqs,bsh->bqh", weights, v).reshape(B, K, G, S, H)
        return self.o_proj(out.transpose(0, 3, 1, 2, 4).reshape(B, S, K * G * H))


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of x [B, S, heads, H], halves rotated as Hugging Face does."""
    S, H = x.shape[1], x.shape[-1]
    positions = jnp.arange(S, dtype=jnp.float32)[:, None]
    angles = positions * theta ** (-jnp.arange(0, H, 2, dtype=jnp.float32) / H)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@jax.custom_vjp
def place(x: jax.Array, source: jax.Array, destination: jax.Array) -> jax.Array:
    """x[source], zeros where `source` is out of range; `destination` is the inverse, so the gradient gathers too.

    XLA on the CPU scatters rows one by one on one core; a permutation's gradient needs no scatter.
    """
    return jnp.take(x, source, axis=0, mode="fill", fill_value=0)


def _place_forward(x: jax.Array, source: jax.Array, destination: jax.Array) -> tuple:
    return place(x, source, destination), destination


def _place_backward(destination: jax.Array, g: jax.Array) -> tuple:
    return jnp.take(g, destination, axis=0, mode="fill", fill_value=0), None, None


place.defvjp(_place_forward, _place_backward)


class Experts(nnx.Module):
    """X of E gated MLPs per token; x: [T, D]. Each expert takes at most `capacity` tokens and drops the rest.

    Returns the sum of the chosen experts' outputs and the load-balancing loss (Switch Transformer, section 2.2).
    """

    def __init__(self, shape: Shape, random: np.random.Generator) -> None:
        self.shape = shape
        E, F, D = shape.E, shape.F, shape.D
        self.gate = normal(random, 0.02, E, D)
        self.gate_proj = normal(random, 1 / math.sqrt(D), E, F, D)
        self.up_proj = normal(random, 1 / math.sqrt(D), E, F, D)
        self.down_proj = normal(random, 0.3 / math.sqrt(F), E, D, F)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        E, X = self.shape.E, self.shape.X
        T, D = x.shape
        probabilities = jax.nn.softmax(x @ self.gate[...].T)
        share, chosen = jax.lax.top_k(probabilities, X)
        share = share / share.sum(axis=-1, keepdims=True)
        one_hot = jax.nn.one_hot(chosen.reshape(T * X), E, dtype=jnp.int32)
        rank = jnp.take_along_axis(jnp.cumsum(one_hot, axis=0), chosen.reshape(T * X, 1), axis=1)[:, 0] - 1
        slot = jnp.where(rank < capacity, chosen.reshape(T * X) * capacity + rank, E * capacity)
        choice_in = jnp.full(E * capacity, T * X).at[slot].set(jnp.arange(T * X), mode="drop")
        tokens = place(jnp.repeat(x, X, axis=0), choice_in, slot).reshape(E, capacity, D)
        hidden = jax.nn.silu(self._project(tokens, self.gate_proj)) * self._project(tokens, self.up_proj)
        out = place(self._project(hidden, self.down_proj).reshape(E * capacity, D), slot, choice_in)
        balance = E * jnp.sum(probabilities.mean(axis=0) * one_hot.mean(axis=0, dtype=jnp.float32))
        return jnp.einsum("txd,tx->td", out.reshape(T, X, D), share), balance

    def _project(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        """x[e] @ weight[e].T for every expert: [E, rows, out]."""
        return jnp.einsum("eri,eoi->ero", x, weight[...])


class Layer(nnx.Module):
    """Attention and experts, each on its normed input, added to the stream."""

    def __init__(self, shape: Shape, random: np.random.Generator) -> None:
        self.input_layernorm = Norm(shape.D, shape.eps)
        self.self_attn = Attention(shape, random)
        self.post_attention_layernorm = Norm(shape.D, shape.eps)
        self.mlp = Experts(shape, random)

    def __call__(self, x: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        x = x + self.self_attn(self.input_layernorm(x))
        out, balance = self.mlp(self.post_attention_layernorm(x).reshape(-1, x.shape[-1]), capacity)
        return x + out.reshape(x.shape), balance


class Model(nnx.Module):
    """Token ids [B, S] to logits [B, S, V] and the mean balance loss of the layers."""

    def __init__(self, shape: Shape, random: np.random.Generator) -> None:
        self.shape = shape
        self.embed_tokens = normal(random, 0.02, shape.V, shape.D)
        self.layers = nnx.List([Layer(shape, random) for _ in range(shape.L)])
        self.norm = Norm(shape.D, shape.eps)

    def __call__(self, ids: jax.Array, slack: float) -> tuple[jax.Array, jax.Array]:
        """`slack`: an expert's capacity over its even share; E / X loses nothing."""
        x = self.embed_tokens[...][ids]
        capacity = math.ceil(ids.size * self.shape.X / self.shape.E * slack)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, capacity)
            balances.append(balance)
        return self.norm(x) @ self.embed_tokens[...].T, jnp.stack(balances).mean()
