"""The decoder that most families share: pre-norm layers, rotary positions, gated MLP or experts.

    h = embed(ids);  per layer:  h += attention(norm(h));  h += mlp(norm(h));  hidden = norm(h);  logits = hidden Eᵀ

With norms after instead, or too:  h += norm(attention(h));  h += norm(attention(norm(h))); the same of the MLP.
In parallel:  h += attention(norm(h)) + mlp(norm(h)), one norm.
With an input of each layer's own, u:  h += norm(projection(act(gate h) * u)) at its end.
Tokens are flat: [T, D] holds tokens of any number of sequences, told apart only by their positions and by
the context's `attend`. A family adds how its config.json is read; see llama.py, qwen.py and gemma.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule, StoredTensor, TensorSlice
from ferrum_jax.layers.attention import Attention, ForwardContext
from ferrum_jax.layers.embedding import Embedding, LayerInputGate, LayerInputs
from ferrum_jax.layers.latent_attention import LatentAttention
from ferrum_jax.layers.linear import Linear, project
from ferrum_jax.layers.mlp import MLP
from ferrum_jax.layers.moe import MoE, NormedMoE
from ferrum_jax.layers.norm import norm_of
from ferrum_jax.layers.rope import Rotation, rotation_of
from ferrum_jax.models.recurrent import Mixer, recurrent_layer
from ferrum_jax.spec import ExpertsSpec, ModelSpec

_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# What Mixtral calls experts, and those after it.
MIXTRALS_EXPERTS = {"block": "block_sparse_moe", "names": {"gate": "w1", "up": "w3", "down": "w2"}}


class DecoderLayer(nnx.Module):
    """Attention and MLP (or experts), each with the norms that the spec says, and beside a residual."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        def norm(is_there: bool) -> Callable[[jax.Array], jax.Array]:
            return norm_of(spec.norm, spec.hidden_size, dtype=dtype) if is_there else _as_it_is

        mixes, has_mlp = layer in spec.mixing_layers, layer not in spec.without_mlp
        self.attention_norm = norm(spec.norm.before and mixes)
        self.attention: Mixer | None = _mixer_of(spec, layer, dtype, rngs)
        self.attention_out_norm = norm(spec.norm.after and mixes)
        self.is_parallel = spec.parallel
        norms_itself = spec.experts is not None and spec.experts.own_norms and layer in spec.experts.layers
        self.mlp_norm = norm(spec.norm.before and has_mlp and not spec.parallel and not norms_itself)
        self.mlp = _mlp_of(spec, layer, dtype, rngs) if has_mlp else None
        self.mlp_out_norm = norm(spec.norm.after and has_mlp)
        self.residual_multiplier = spec.residual_multiplier
        own = spec.layer_inputs
        self.own_input = None if own is None else LayerInputGate(spec.hidden_size, own, dtype=dtype, rngs=rngs)
        self.own_input_norm = norm(own is not None)
        self.scale = nnx.Param(jnp.ones((1,), dtype)) if spec.layer_scales else None

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        rotation: Rotation,
        context: ForwardContext,
        own_input: jax.Array | None = None,  # [T, P], of a model whose layers have such
    ) -> jax.Array:  # [T, D]
        x = self._mixed(x, rotation, context)
        if self.own_input is not None and own_input is not None:
            x = x + self.own_input_norm(self.own_input(x, own_input))
        return x if self.scale is None else x * self.scale[...][None]

    def _mixed(self, x: jax.Array, rotation: Rotation, context: ForwardContext) -> jax.Array:  # [T, D] -> [T, D]
        """The residual with what attention and MLP add."""
        normed = self.attention_norm(x)
        if self.attention is not None:
            x = x + self._scaled(self.attention_out_norm(self.attention(normed, rotation, context)))
        if self.mlp is None:
            return x
        given = normed if self.is_parallel else self.mlp_norm(x)
        return x + self._scaled(self.mlp_out_norm(self.mlp(given, context)))

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_multiplier == 1 else x * jnp.asarray(self.residual_multiplier, x.dtype)


class SideBySide(nnx.Module):
    """Attention and a recurrence, given the same tokens; what they give is added."""

    def __init__(self, attention: Mixer, recurrence: Mixer) -> None:
        self.attention, self.recurrence = attention, recurrence

    def __call__(self, x: jax.Array, rotation: Rotation, context: ForwardContext) -> jax.Array:  # [T, D] -> [T, D]
        return self.attention(x, rotation, context) + self.recurrence(x, rotation, context)


def _mixer_of(spec: ModelSpec, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> Mixer | None:
    """What joins a token with those before it: attention, what has a recurrent state, both, or nothing."""
    attention = recurrence = None
    if layer in spec.attention_layers:
        kind = Attention if spec.attention_of(layer).latent is None else LatentAttention
        attention = kind(spec, layer, dtype=dtype, rngs=rngs)
    if layer in spec.state_layers and spec.recurrence is not None:
        recurrence = recurrent_layer(spec, layer, dtype=dtype, rngs=rngs)
    if attention is not None and recurrence is not None:
        return SideBySide(attention, recurrence)
    return recurrence if attention is None else attention


def _mlp_of(spec: ModelSpec, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> MoE | MLP:
    if spec.experts is not None and layer in spec.experts.layers:
        if spec.experts.own_norms:
            return NormedMoE(spec.hidden_size, spec.experts, spec.mlp, spec.norm, dtype=dtype, rngs=rngs)
        return MoE(spec.hidden_size, spec.experts, spec.mlp, dtype=dtype, rngs=rngs)
    return MLP(spec.hidden_size, spec.mlp_of(layer), dtype=dtype, rngs=rngs)


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
        own = spec.layer_inputs
        self.layer_inputs = None if own is None else LayerInputs(spec, own, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(spec, layer, dtype=dtype, rngs=rngs) for layer in range(spec.num_hidden_layers)]
        )
        self.norm = norm_of(spec.norm, spec.hidden_size, dtype=dtype)
        tied = spec.tie_word_embeddings
        head = functools.partial(Linear, spec.hidden_size, spec.vocab_size, bias=spec.head_bias)
        self.head = None if tied else head(dtype=dtype, rngs=rngs)

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        positions: jax.Array,  # [T] int32, absolute; [3, T] where rotary positions have sections
        context: ForwardContext,
    ) -> jax.Array:  # [T, D], after the final norm
        context = dataclasses.replace(context, lent={})
        images = context.images
        x = self.embed(token_ids, context.shards)
        x = x if images is None else images.in_place_of(x)
        context.show("embed", x)
        inputs = None if self.layer_inputs is None else self._inputs_of_layers(token_ids, x, context)
        kinds = [self.spec.attention_of(layer) for layer in range(len(self.layers))]
        rotations = {kind: rotation_of(positions, kind) for kind in dict.fromkeys(kinds)}
        for i, (layer, kind) in enumerate(zip(self.layers, kinds, strict=True)):
            x = layer(x, rotations[kind], context, None if inputs is None else inputs[:, i])
            x = x if images is None else images.added(x, i)
            context.show(f"layers.{i}", x)
        x = self.norm(x)
        context.show("norm", x)
        return x

    def _inputs_of_layers(self, token_ids: jax.Array, x: jax.Array, context: ForwardContext) -> jax.Array:  # [T, L, P]
        assert self.layer_inputs is not None and self.spec.layer_inputs is not None, "each layer has an input"
        if context.images is not None:  # whose ids say nothing; their embeddings count alone
            token_ids = jnp.where(context.images.are_here, self.spec.layer_inputs.image_id, token_ids)
        return self.layer_inputs(token_ids, x, context.shards)

    def logits(self, hidden: jax.Array) -> jax.Array:  # [R, D] -> [R, V] float32
        """Scores of every token after each hidden state; on a mesh, of the tokens whose vectors are here."""
        if self.head is None:
            scores = self.embed.attend(hidden)
        else:
            scores = project(hidden, self.head.weight[...], out_dtype=jnp.float32)
            if self.head.bias is not None:
                scores = scores + self.head.bias[...].astype(jnp.float32)[None, :]
        if self.spec.logit_scale != 1:
            scores = scores * self.spec.logit_scale
        cap = self.spec.final_logit_softcapping
        return scores if cap is None else cap * jnp.tanh(scores / cap)


# Where the norms of a layer stand in a checkpoint, by our names: those of norms before, after, and on both sides.
BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
BOTH = AFTER | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


_AS_THEY_ARE: Mapping[str, Any] = MappingProxyType({})


def weight_rules(
    spec: ModelSpec,
    *,
    norms: Mapping[str, str] | None = None,
    attention: Mapping[str, str] = _AS_THEY_ARE,
    mlp: Mapping[str, str] = _AS_THEY_ARE,
    experts: Mapping[str, Any] = _AS_THEY_ARE,
) -> tuple[Rule, ...]:
    """Every parameter of a Decoder of this spec, and the Hugging Face tensor it comes from.

    The others: what a family's checkpoints call differently, arguments of the functions below.
    """
    body = (*attention_rules(spec, **attention), *mlp_rules(spec, **mlp), *expert_rules(spec, **experts))
    return (*frame_rules(spec, norms), *body)


def frame_rules(spec: ModelSpec, norms: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """Embedding, head and the norms between layers. norms: names of those of a layer, by ours."""
    every = tuple(range(spec.num_hidden_layers))
    of_head = () if spec.tie_word_embeddings else ("weight", "bias") if spec.head_bias else ("weight",)
    final = ("weight", "bias") if spec.norm.bias else ("weight",)
    usual = BOTH if spec.norm.after and spec.norm.before else AFTER if spec.norm.after else BEFORE
    of_layer = (usual if norms is None else norms).items()
    return (
        Rule(source="model.embed_tokens.weight", target="embed.weight"),
        *(Rule(source=f"model.norm.{part}", target=f"norm.{part}") for part in final),
        *(Rule(source=f"lm_head.{part}", target=f"head.{part}") for part in of_head),
        *(rule for ours, theirs in of_layer for rule in linear(theirs, ours, every, spec.norm.bias)),
    )


def attention_rules(
    spec: ModelSpec, q_norm: str = "q_norm", k_norm: str = "k_norm", output: str = "o_proj"
) -> tuple[Rule, ...]:
    """Projections of attention, each a tensor of its own, and the norms of its heads, by their names."""
    layers, own = spec.attention_layers, spec.attention
    keep = tuple(layer for layer in layers if spec.lender_of(layer) == layer)
    has_norms = own.qk_norm is not None and own.qk_norm.has_weight
    suffix = "heads_norm" if own.qk_norm is not None and own.qk_norm.over_all_heads else "norm"
    values = tuple(layer for layer in keep if not spec.attention_of(layer).value_of_key)
    having = {"q": layers, "k": keep, "v": values}.items()
    return (
        *(rule for x, has in having for rule in linear(f"self_attn.{x}_proj", f"attention.{x}", has, own.bias)),
        *linear(f"self_attn.{output}", "attention.o", layers, own.output_bias),
        *per_layer(f"self_attn.{q_norm}.weight", f"attention.q_{suffix}.weight", layers if has_norms else ()),
        *per_layer(f"self_attn.{k_norm}.weight", f"attention.k_{suffix}.weight", keep if has_norms else ()),
    )


def mlp_rules(spec: ModelSpec, up: str = "up_proj", down: str = "down_proj") -> tuple[Rule, ...]:
    """The MLPs of layers without experts, by their names."""
    parts = {"gate": "gate_proj"} if spec.mlp.gated else {}
    names = (parts | {"up": up, "down": down}).items()
    layers, bias = spec.dense_layers, spec.mlp.bias
    return tuple(rule for ours, name in names for rule in linear(f"mlp.{name}", f"mlp.{ours}", layers, bias))


def fused_mlp_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """The MLPs of layers without experts, whose gate and up are one tensor."""
    layers, parts = spec.dense_layers, halves(spec.mlp.intermediate_size)
    return (
        *parts_per_layer("mlp.gate_up_proj.weight", "mlp.{part}.weight", layers, parts),
        *per_layer("mlp.down_proj.weight", "mlp.down.weight", layers),
    )


def halves(width: int, *, axis: int = 0, transposed: bool = False) -> dict[str, TensorSlice]:
    """Gate and up, of this width, which stand one behind the other along an axis of one tensor."""
    gate = TensorSlice(axis=axis, stop=width, transposed=transposed)
    return {"gate": gate, "up": TensorSlice(axis=axis, start=width, transposed=transposed)}


def stacked_expert_rules(
    experts: ExpertsSpec | None, gate_up: str, down: str, *, router: str, transposed: bool = False
) -> tuple[Rule, ...]:
    """Routers, and experts of which a layer's are stacked, [E, out, in], gate by up; transposed: [E, in, out]."""
    if experts is None:
        return ()
    layers = experts.layers
    parts = halves(experts.intermediate_size, axis=2 if transposed else 1, transposed=transposed)
    return (
        *per_layer(router, "mlp.router.weight", layers),
        *parts_per_layer(gate_up, "mlp.experts.{part}", layers, parts),
        *per_layer(down, "mlp.experts.down", layers, TensorSlice(transposed=True) if transposed else None),
    )


def joined(rules: Iterable[Rule], spec: ModelSpec, *, transposed: bool = False) -> tuple[Rule, ...]:
    """The rules, those of experts' matrices with the tensor that may hold them all: see `stacked_expert_rules`."""
    width = 0 if spec.experts is None else spec.experts.intermediate_size
    parts = halves(width, axis=2 if transposed else 1, transposed=transposed)

    def with_stack(rule: Rule) -> Rule:
        part = parts.get(rule.target.rpartition(".")[2], TensorSlice(transposed=True) if transposed else None)
        name = "down_proj" if rule.target.endswith("down") else "gate_up_proj"
        return dataclasses.replace(rule, joined=StoredTensor(rule.source.partition("{e}")[0] + name, part))

    return tuple(with_stack(rule) if rule.experts else rule for rule in rules)


def expert_rules(
    spec: ModelSpec,
    *,
    block: str = "mlp",
    names: Mapping[str, str] = _MLP,
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    shared: str = "shared_expert",
) -> tuple[Rule, ...]:
    """The routers, and the experts' matrices, each a tensor of its own. block and the others: their names."""
    if spec.experts is None:
        return ()
    layers, has_correction = spec.experts.layers, spec.experts.corrected
    return (
        *per_layer(f"{block}.{router}.weight", "mlp.router.weight", layers),
        *per_layer(f"{block}.{correction}", "mlp.correction", layers if has_correction else ()),
        *(
            Rule(
                source=f"model.layers.{{i}}.{block}.experts.{{e}}.{name}.weight",
                target=f"layers.{{i}}.mlp.experts.{ours}",
                layers=layers,
                experts=spec.experts.num_experts,
            )
            for ours, name in names.items()
        ),
        *shared_expert_rules(spec.experts, f"{block}.{shared}", spec.mlp.bias),
    )


def shared_expert_rules(experts: ExpertsSpec, name: str, bias: bool = False) -> tuple[Rule, ...]:
    """The expert of all tokens, and its gate where it has one."""
    if not experts.shared_intermediate_size:
        return ()
    names = (pair for pair in _MLP.items() if experts.has_gates or pair[0] != "gate")
    parts = (linear(f"{name}.{theirs}", f"mlp.shared.{ours}", experts.layers, bias) for ours, theirs in names)
    gate = per_layer(f"{name}_gate.weight", "mlp.shared_gate.weight", experts.layers if experts.shared_gate else ())
    return (*(rule for rules in parts for rule in rules), *gate)


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that a checkpoint may carry and the model does not need."""
    return ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_word_embeddings else ()))


def per_layer(source: str, target: str, layers: tuple[int, ...], part: TensorSlice | None = None) -> tuple[Rule, ...]:
    """The rule of a tensor, or a part of one, that each of these layers has; none without layers."""
    if not layers:
        return ()
    return (Rule(source=f"model.layers.{{i}}.{source}", target=f"layers.{{i}}.{target}", layers=layers, part=part),)


def parts_per_layer(
    source: str, target: str, layers: tuple[int, ...], parts: Mapping[str, TensorSlice]
) -> tuple[Rule, ...]:
    """The rules of a tensor of these layers that holds several parameters; {part} in the target is the part's name."""
    found = (per_layer(source, target.replace("{part}", name), layers, part) for name, part in parts.items())
    return tuple(rule for rules in found for rule in rules)


def linear(source: str, target: str, layers: tuple[int, ...], bias: bool) -> tuple[Rule, ...]:
    """The weight and, where there is one, the bias of a linear layer of each of these layers."""
    weight = per_layer(f"{source}.weight", f"{target}.weight", layers)
    return weight + (per_layer(f"{source}.bias", f"{target}.bias", layers) if bias else ())
