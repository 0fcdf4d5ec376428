"""The decoder that most families share: pre-norm layers, rotary positions, gated MLP or experts.

    h = embed(ids);  per layer:  h += attention(norm(h));  h += mlp(norm(h));  hidden = norm(h);  logits = hidden Eᵀ

With norms after instead, or too:  h += norm(attention(h));  h += norm(attention(norm(h))); the same of the MLP.
In parallel:  h += attention(norm(h)) + mlp(norm(h)), one norm.
With hyper-connections h is several residuals: a half is given a sum of them, and each gets a share of its output.
With an input of each layer's own, u:  h += norm(projection(act(gate h) * u)) at its end.
Tokens are flat: [T, D] holds tokens of any number of sequences, told apart only by their positions and by
the context's `attend`. A family adds how its config.json is read; see llama.py, qwen.py and gemma.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ferrum_jax.models.families.mtp import MtpEnds
from ferrum_jax.models.families.recurrent import Mixer, recurrent_layer
from ferrum_jax.models.layers.attention import (
    Attention,
    ForwardContext,
    KeysAndValues,
    LayerArguments,
    LayerContext,
    RunLayer,
)
from ferrum_jax.models.layers.embedding import Embedding, LayerInputGate, LayerInputs
from ferrum_jax.models.layers.hyper_connections import HyperConnection, StreamSum
from ferrum_jax.models.layers.indexer import IndexedAttention
from ferrum_jax.models.layers.latent_attention import LatentAttention
from ferrum_jax.models.layers.linear import Linear, project
from ferrum_jax.models.layers.mlp import MLP
from ferrum_jax.models.layers.moe import MoE, NormedMoE
from ferrum_jax.models.layers.norm import GatedNorm, norm_of
from ferrum_jax.models.layers.rope import Rotation, rotation_of
from ferrum_jax.models.spec import ModelSpec


class CrossAttention(nnx.Module):
    """Attention to the states of an encoder, whose keys and values are made once for a clip; a device has some heads.

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


class DecoderLayer(nnx.Module):
    """Attention and MLP (or experts), each with the norms that the spec says, and beside a residual."""

    def __init__(self, spec: ModelSpec, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> None:
        def norm(is_there: bool, gated: bool = False) -> Callable[[jax.Array], jax.Array]:
            if is_there and gated and spec.norm.gate_rank:
                return GatedNorm(spec.hidden_size, spec.norm, dtype=dtype, rngs=rngs)
            return norm_of(spec.norm, spec.hidden_size, dtype=dtype) if is_there else _as_it_is

        mixes, has_mlp = layer in spec.mixing_layers, layer not in spec.without_mlp
        self.attention_norm = norm(spec.norm.before and mixes, gated=True)
        self.attention: Mixer | None = _mixer_of(spec, layer, dtype, rngs)
        self.attention_out_norm = norm(spec.norm.after and mixes)
        self.is_parallel = spec.parallel
        norms_itself = spec.experts is not None and spec.experts.own_norms and layer in spec.experts.layers
        norms_before = spec.norm.before and has_mlp and not spec.parallel and not norms_itself
        self.mlp_norm = norm(norms_before, gated=layer in spec.moe_layers)
        self.mlp = _mlp_of(spec, layer, dtype, rngs) if has_mlp else None
        self.mlp_out_norm = norm(spec.norm.after and has_mlp)
        self.residual_multiplier = spec.residual_multiplier

        def connection() -> HyperConnection | None:
            own = spec.hyper_connections
            return None if own is None else HyperConnection(own, spec.hidden_size, spec.norm, rngs=rngs)

        self.attention_streams, self.mlp_streams = connection(), connection()
        own = spec.layer_inputs
        self.own_input = None if own is None else LayerInputGate(spec.hidden_size, own, dtype=dtype, rngs=rngs)
        self.own_input_norm = norm(own is not None)
        self.scale = nnx.Param(jnp.ones((1,), dtype)) if spec.layer_scales else None

    def __call__(
        self,
        x: jax.Array,  # [T, D]; with hyper-connections [T, S, D]
        beside: LayerArguments,
        context: LayerContext,
    ) -> jax.Array:  # the same
        x = self._mixed(x, beside.rotation, context)
        if self.own_input is not None and beside.own_input is not None:
            x = x + self.own_input_norm(self.own_input(x, beside.own_input))
        x = x if self.scale is None else x * self.scale[...][None]
        return x if beside.added is None else x + beside.added

    def _mixed(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        """The residual with what attention and MLP add."""
        if self.attention_streams is not None and self.mlp_streams is not None:
            return self._mixed_streams(x, self.attention_streams, self.mlp_streams, rotation, context)
        normed = self.attention_norm(x)
        if self.attention is not None:
            x = x + self._scaled(self.attention_out_norm(self.attention(normed, rotation, context)))
        if self.mlp is None:
            return x
        given = normed if self.is_parallel else self.mlp_norm(x)
        return x + self._scaled(self.mlp_out_norm(self.mlp(given, context)))

    def _mixed_streams(
        self, x: jax.Array, first: HyperConnection, second: HyperConnection, rotation: Rotation, context: LayerContext
    ) -> jax.Array:  # [T, S, D] -> the same
        assert self.attention is not None and self.mlp is not None, "a layer with hyper-connections has both halves"
        given, weights = first.given(x)
        x = first.added(x, self.attention(self.attention_norm(given), rotation, context), weights)
        given, weights = second.given(x)
        return second.added(x, self.mlp(self.mlp_norm(given), context), weights)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.residual_multiplier == 1 else x * jnp.asarray(self.residual_multiplier, x.dtype)


class SideBySide(nnx.Module):
    """Attention and a recurrence, given the same tokens; what they give is added."""

    def __init__(self, attention: Mixer, recurrence: Mixer) -> None:
        self.attention, self.recurrence = attention, recurrence

    def __call__(self, x: jax.Array, rotation: Rotation, context: LayerContext) -> jax.Array:  # [T, D] -> [T, D]
        return self.attention(x, rotation, context) + self.recurrence(x, rotation, context)


def _mixer_of(spec: ModelSpec, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs | None) -> Mixer | None:
    """The mixer of a layer: attention, a recurrent state, both, attention to a clip, or None."""
    attention = recurrence = None
    if layer in spec.cross_layers:
        return CrossAttention(spec, layer, dtype=dtype, rngs=rngs)
    if layer in spec.attention_layers:
        own = spec.attention_of(layer)
        kind = LatentAttention if own.latent is not None else Attention if own.indexer is None else IndexedAttention
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
        limits = spec.experts.limits_of(layer)
        return MoE(spec.hidden_size, spec.experts, spec.mlp, limits=limits, dtype=dtype, rngs=rngs)
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
        positions = spec.max_position_embeddings if spec.learned_positions else 0
        self.positions = Embedding(positions, spec.hidden_size, dtype=dtype, rngs=rngs) if positions else None
        own = spec.layer_inputs
        self.layer_inputs = None if own is None else LayerInputs(spec, own, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(spec, layer, dtype=dtype, rngs=rngs) for layer in range(spec.num_layers)])
        self.mtp = nnx.List([MtpEnds(spec, dtype=dtype, rngs=rngs) for _ in range(spec.num_mtp_layers)])
        self.norm = norm_of(spec.norm, spec.hidden_size, dtype=dtype)
        rope, H = spec.attention.rope, spec.attention.head_dim
        learned = rope is not None and rope.learned_frequencies
        # float32 in every dtype, as its products with positions
        self.rope_weights = nnx.Param(jnp.zeros((rope.rotary_dim(H) // 2,), jnp.float32)) if rope and learned else None
        streams = spec.hyper_connections
        self.streams = None if streams is None else StreamSum(streams, spec.hidden_size, spec.norm, rngs=rngs)
        tied = spec.tie_word_embeddings
        head = functools.partial(Linear, spec.hidden_size, spec.vocab_size, bias=spec.head_bias)
        self.head = None if tied else head(dtype=jnp.dtype(jnp.float32) if spec.wide_head else dtype, rngs=rngs)

    def __call__(
        self,
        token_ids: jax.Array,  # [T] int32
        positions: jax.Array,  # [T] int32, absolute; [3, T] where rotary positions have sections
        context: ForwardContext,
    ) -> jax.Array:  # [T, D], after the final norm
        run = context.run or _one_by_one(self.spec, context)
        images = context.images
        x = self.embed(token_ids, context.shards)
        x = x if images is None else images.in_place_of(x)
        x = x if self.positions is None else x + self.positions(positions)
        x = x if self.streams is None else jnp.repeat(x[:, None], self.streams.own.num_streams, axis=1)
        context.show("embed", x)
        inputs = None if self.layer_inputs is None else self._inputs_of_layers(token_ids, x, context)
        kinds = [self.spec.attention_of(layer) for layer in range(self.spec.num_hidden_layers)]
        learned = None if self.rope_weights is None else self.rope_weights[...]
        rotations = {kind: rotation_of(positions, kind, learned) for kind in dict.fromkeys(kinds)}
        for i, kind in enumerate(kinds):
            beside = LayerArguments(
                rotation=rotations[kind],
                own_input=None if inputs is None else inputs[:, i],
                added=None if images is None else images.added(x, i),
            )
            x = run(i, self.layers[i], x, beside)
            context.show(f"layers.{i}", x)
        x = self.norm(x if self.streams is None else self.streams(x))
        context.show("norm", x)
        return x

    def draft(
        self,
        token_ids: jax.Array,  # [T] int32, each the one after that of its hidden state
        hidden: jax.Array,  # [T, D], what a forward gives, or the draft before this one
        positions: jax.Array,  # [T] int32, as a forward takes them, of the hidden states or all one further
        context: ForwardContext,
        depth: int = 0,
    ) -> jax.Array:  # [T, D], after the norm of its own
        """Hidden states whose `logits` are of the token after each of these, by the layer behind the last, or a later.

        depth: of the layer; a later one is given the output of the layer before, and tokens one further on. The KV of a
        hidden state are of its token and the next one.
        """
        run = context.run or _one_by_one(self.spec, context)
        index, images = self.spec.num_hidden_layers + depth, context.images
        embedded = self.embed(token_ids, context.shards)
        embedded = embedded if images is None else images.in_place_of(embedded)
        rotation = rotation_of(positions, self.spec.attention_of(index))
        x = self.mtp[depth](embedded, hidden)
        return self.mtp[depth].norm(run(index, self.layers[index], x, LayerArguments(rotation=rotation)))

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
            hidden = hidden.astype(jnp.float32) if self.spec.wide_head else hidden
            scores = project(hidden, self.head.weight[...], out_dtype=jnp.float32)
            if self.head.bias is not None:
                scores = scores + self.head.bias[...].astype(jnp.float32)[None, :]
        if self.spec.logit_scale != 1:
            scores = scores * self.spec.logit_scale
        cap = self.spec.final_logit_softcapping
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def _one_by_one(spec: ModelSpec, context: ForwardContext) -> RunLayer:
    """Layers called where they stand, each with what earlier ones lent to it and chose."""
    lent: dict[int, KeysAndValues] = {}
    last = LayerContext()

    def run(index: int, layer: Any, x: jax.Array, beside: LayerArguments) -> jax.Array:
        nonlocal last
        own = LayerContext(
            attend=functools.partial(context.attend, index),
            across=functools.partial(context.across, index),
            choose=functools.partial(context.choose, index),
            recur=functools.partial(context.recur, index),
            shards=context.shards,
            borrowed=lent.get(spec.lender_of(index)),
            chosen=last.chosen,
        )
        x = layer(x, beside, own)
        last = own
        if own.lent is not None:
            lent[index] = own.lent
        return x

    return run
