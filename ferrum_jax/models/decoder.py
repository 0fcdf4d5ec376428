"""The decoder that most families share: pre-norm layers, rotary positions, gated MLP or experts.

    h = embed(ids);  per layer:  h += attention(norm(h));  h += mlp(norm(h));  hidden = norm(h);  logits = hidden Eᵀ

With sandwich norms:  h += norm(attention(norm(h)));  h += norm(mlp(norm(h))).
Tokens are flat: [T, D] holds tokens of any number of sequences, told apart only by their positions and by
the context's `attend`. A family adds how its config.json is read; see llama.py, qwen.py and gemma.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Part, Rule
from ferrum_jax.layers.attention import Attention, ForwardContext
from ferrum_jax.layers.embedding import Embedding
from ferrum_jax.layers.linear import Linear, project
from ferrum_jax.layers.mlp import MLP
from ferrum_jax.layers.moe import MoE
from ferrum_jax.layers.norm import norm_of
from ferrum_jax.layers.rope import rotations
from ferrum_jax.spec import ModelSpec

_MLP = ("gate", "up", "down")


class DecoderLayer(nnx.Module):
    """Attention and MLP (or experts), each behind a norm, or between two, and beside a residual."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        D = spec.hidden_size
        self.attention_norm = norm_of(spec, D, dtype=dtype)
        # what a family with recurrent layers puts in its place is called alike
        self.attention: Callable[..., jax.Array] = Attention(spec, layer, dtype=dtype, rngs=rngs)
        self.attention_out_norm = norm_of(spec, D, dtype=dtype) if spec.sandwich_norms else _as_it_is
        self.mlp_norm = norm_of(spec, D, dtype=dtype)
        self.mlp = (MoE if layer in spec.moe_layers else MLP)(spec, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = norm_of(spec, D, dtype=dtype) if spec.sandwich_norms else _as_it_is

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: tuple[jax.Array, jax.Array],  # [T, 1, H/2] float32 each
        context: ForwardContext,
    ) -> jax.Array:  # [T, D]
        x = x + self.attention_out_norm(self.attention(self.attention_norm(x), rotation, context))
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), context))


def _as_it_is(x: jax.Array) -> jax.Array:
    return x


class Decoder(nnx.Module):
    """A whole model with weights drawn at random (norms 1, biases 0, the rest N(0, 0.02²)) until others are bound.

    dtype: of weights and activations. Logits are float32. Without rngs the drawn weights are zeros.
    """

    def __init__(self, spec: ModelSpec, *, dtype: jnp.dtype | str = jnp.float32, rngs: nnx.Rngs | None) -> None:
        dtype = jnp.dtype(dtype)
        self.spec = spec
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, scale=spec.embedding_scale, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(spec, layer, dtype=dtype, rngs=rngs) for layer in range(spec.num_hidden_layers)]
        )
        self.norm = norm_of(spec, spec.hidden_size, dtype=dtype)
        tied = spec.tie_word_embeddings
        self.head = None if tied else Linear(spec.hidden_size, spec.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        positions: jax.Array,  # [T] int32, absolute
        context: ForwardContext,
    ) -> jax.Array:  # [T, D], after the final norm
        x = self.embed(token_ids, context.shards)
        context.show("embed", x)
        ropes = [self.spec.rope_of(layer) for layer in range(len(self.layers))]
        rotation_of = {rope: rotations(positions, rope, self.spec.head_dim) for rope in dict.fromkeys(ropes)}
        for i, (layer, rope) in enumerate(zip(self.layers, ropes, strict=True)):
            x = layer(x, rotation_of[rope], context)
            context.show(f"layers.{i}", x)
        x = self.norm(x)
        context.show("norm", x)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:  # [R, D] -> [R, V] float32
        """Scores of every token after each hidden state; on a mesh, of the tokens whose vectors are here."""
        if self.head is None:
            scores = self.embed.attend(hidden)
        else:
            scores = project(hidden, self.head.weight[...], out_dtype=jnp.float32)
        cap = self.spec.final_logit_softcapping
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Decoder of this spec, and the Hugging Face tensor it comes from."""
    return (*frame_rules(spec), *attention_rules(spec), *mlp_rules(spec), *expert_rules(spec))


def frame_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Embedding, head and the norms between layers."""
    every = tuple(range(spec.num_hidden_layers))
    head = () if spec.tie_word_embeddings else (Rule(source="lm_head.weight", target="head.weight"),)
    before_mlp = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
    sandwiched = every if spec.sandwich_norms else ()
    return (
        Rule(source="model.embed_tokens.weight", target="embed.weight"),
        Rule(source="model.norm.weight", target="norm.weight"),
        *head,
        *per_layer("input_layernorm.weight", "attention_norm.weight", every),
        *per_layer("post_attention_layernorm.weight", "attention_out_norm.weight", sandwiched),
        *per_layer(f"{before_mlp}.weight", "mlp_norm.weight", every),
        *per_layer("post_feedforward_layernorm.weight", "mlp_out_norm.weight", sandwiched),
    )


def attention_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Projections of attention, each a tensor of its own, and the norms of its heads."""
    layers = tuple(layer for layer in range(spec.num_hidden_layers) if layer not in spec.state_layers)
    normed = layers if spec.qk_norm else ()
    return (
        *(rule for x in "qkv" for rule in linear(f"self_attn.{x}_proj", f"attention.{x}", layers, spec.attention_bias)),
        *linear("self_attn.o_proj", "attention.o", layers, spec.attention_output_bias),
        *per_layer("self_attn.q_norm.weight", "attention.q_norm.weight", normed),
        *per_layer("self_attn.k_norm.weight", "attention.k_norm.weight", normed),
    )


def mlp_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The MLPs of layers without experts."""
    dense = tuple(layer for layer in range(spec.num_hidden_layers) if layer not in spec.moe_layers)
    return tuple(rule for x in _MLP for rule in linear(f"mlp.{x}_proj", f"mlp.{x}", dense, spec.mlp_bias))


def expert_rules(
    spec: ModelSpec, *, block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[Rule, ...]:
    """The routers, and the experts' matrices, each a tensor of its own. block, gate, up, down: their names."""
    if not spec.moe_layers:
        return ()
    return (
        *per_layer(f"{block}.gate.weight", "mlp.router.weight", spec.moe_layers),
        *(
            Rule(
                source=f"model.layers.{{i}}.{block}.experts.{{e}}.{name}.weight",
                target=f"layers.{{i}}.mlp.experts.{ours}",
                layers=spec.moe_layers,
                experts=spec.num_experts,
            )
            for ours, name in (("gate", gate), ("up", up), ("down", down))
        ),
        *_shared_expert_rules(spec),
    )


def _shared_expert_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The expert of all tokens, and its gate."""
    if not spec.shared_expert_intermediate_size:
        return ()
    parts = (linear(f"mlp.shared_expert.{x}_proj", f"mlp.shared.{x}", spec.moe_layers, False) for x in _MLP)
    gate = per_layer("mlp.shared_expert_gate.weight", "mlp.shared_gate.weight", spec.moe_layers)
    return (*(rule for rules in parts for rule in rules), *gate)


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may carry and the model does not need."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_word_embeddings else ()))


def per_layer(source: str, target: str, layers: tuple[int, ...], part: Part | None = None) -> tuple[Rule, ...]:
    """The rule of a tensor, or a part of one, that each of these layers has; none without layers."""
    if not layers:
        return ()
    return (Rule(source=f"model.layers.{{i}}.{source}", target=f"layers.{{i}}.{target}", layers=layers, part=part),)


def linear(source: str, target: str, layers: tuple[int, ...], bias: bool) -> tuple[Rule, ...]:
    """The weight and, where there is one, the bias of a linear layer of each of these layers."""
    weight = per_layer(f"{source}.weight", f"{target}.weight", layers)
    return weight + (per_layer(f"{source}.bias", f"{target}.bias", layers) if bias else ())
