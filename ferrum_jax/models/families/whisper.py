"""WhisperForConditionalGeneration: an encoder of sounds, and a decoder whose layers also attend to its states.

    x = gelu(conv(gelu(conv(frames)))) + positions;  per layer:  x += attention(norm(x));  x += mlp(norm(x))
    states = norm(x);  for each layer of the decoder:  k = W_k states, v = W_v states

A window has as many frames for every clip. Layers of the decoder are two of ours each: one that attends to the tokens
before it, and one that attends to the clip and has the MLP.
Source: Radford et al. 2022 (Whisper); keys and defaults as in Hugging Face's WhisperConfig.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader, stored_dtype
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.layers.bidirectional_layer import BidirectionalLayer
from ferrum_jax.models.layers.embedding import Embedding
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.spec import AttentionSpec, CacheGroup, MlpSpec, ModelSpec, NormSpec, SoundSpec

PREFIX = "sound."  # of the encoder's parameters among those of its model
_EPS = 1e-5
_ENCODER, _DECODER = "model.encoder.", "model.decoder."
# Keys that no logit depends on: of training, of time stamps by attention, and of classifiers.
_UNREAD = """
    dropout activation_dropout encoder_layerdrop decoder_layerdrop init_std median_filter_width apply_spec_augment
    mask_time_prob mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks
    classifier_proj_size use_weighted_layer_sum num_hidden_layers
""".split()  # noqa: SIM905


class FrameConvolution(nnx.Module):
    """A convolution over three neighbouring frames, zeros beyond the ends. weight [out, in, 3] as in checkpoints."""

    def __init__(self, num_in: int, num_out: int, *, stride: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in, 3), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:  # [frames, in] -> [frames / stride, out]
        weight = self.weight[...]
        padded = jnp.pad(x.astype(weight.dtype), ((1, 1), (0, 0)))
        three = [padded[i : i + len(x) : self.stride] for i in range(3)]
        windows = jnp.stack(three, axis=-1).reshape(len(three[0]), -1)
        y = jax.lax.dot_general(
            windows, weight.reshape(len(weight), -1), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (y + self.bias[...].astype(jnp.float32)[None]).astype(weight.dtype)


class EncoderLayer(BidirectionalLayer):
    """A layer whose positions attend to all of a window."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype) -> None:
        super().__init__(spec, eps=_EPS, key_bias=False, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:  # [T, D] -> [T, D]
        return self.mixed(x, _attention(*self.heads(x)))


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:  # [T, N, H] each -> [T, N, H], q's dtype
    """softmax(q kᵀ / sqrt(H)) v, of every position over all; softmax in float32.

    A head at a time: the scores of one are what a core's cache and a TPU's vector memory hold, and a product of two
    matrices keeps all cores busy, which one of many small matrices does not.
    """

    def of_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:  # [T, H] each -> [T, H]
        q, k, v = head
        scores = jnp.dot(q, k.T, preferred_element_type=jnp.float32) * q.shape[1] ** -0.5
        weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
        found = jnp.dot(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return (found / jnp.sum(weights, axis=1, keepdims=True)).astype(q.dtype)

    heads_first = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    return jnp.swapaxes(jax.lax.map(of_head, heads_first), 0, 1)


class Reader(nnx.Module):
    """The keys and values that one layer of the decoder reads of the encoder's states."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype) -> None:
        self.k = Linear(spec.hidden_size, spec.out_size, dtype=dtype, rngs=None)
        self.v = Linear(spec.hidden_size, spec.out_size, bias=True, dtype=dtype, rngs=None)


class WhisperEncoder(nnx.Module):
    """A whole encoder with the readers of its states; its weights are zeros until others are bound."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype, D = jnp.dtype(dtype), spec.hidden_size
        self.act = activation_of(spec.hidden_act)
        self.narrow = FrameConvolution(spec.num_mels, D, stride=1, dtype=dtype)
        self.wide = FrameConvolution(D, D, stride=2, dtype=dtype)
        self.positions = Embedding(spec.num_positions, D, dtype=dtype, rngs=None)
        self.layers = nnx.List([EncoderLayer(spec, dtype=dtype) for _ in range(spec.num_layers)])
        self.norm = LayerNorm(D, eps=_EPS, dtype=dtype)
        self.readers = nnx.List([Reader(spec, dtype=dtype) for _ in range(spec.num_readers)])

    def __call__(self, frames: jax.Array) -> jax.Array:  # [frames of one window, mels] -> [positions, D]
        x = self.act(self.wide(self.act(self.narrow(frames))))
        x = x + self.positions.weight[...]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def keys_and_values(self, states: jax.Array, layer: int) -> tuple[jax.Array, jax.Array]:  # [positions, out] each
        """Keys and values of a window's states, by the reader of a layer."""
        return self.readers[layer].k(states), self.readers[layer].v(states)


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.leave(*_UNREAD)
    reader.only(scale_embedding=False, tie_word_embeddings=True)
    width, num_layers, act = (
        reader.require("d_model"),
        reader.require("decoder_layers"),
        reader.get("activation_function", "gelu"),
    )
    num_heads = reader.require("decoder_attention_heads")
    sound = SoundSpec(
        hidden_size=width,
        intermediate_size=reader.require("encoder_ffn_dim"),
        num_layers=reader.require("encoder_layers"),
        num_heads=reader.require("encoder_attention_heads"),
        num_mels=reader.get("num_mel_bins", 80),
        num_positions=reader.get("max_source_positions", 1500),
        num_readers=num_layers,
        out_size=width,
        hidden_act=act,
    )
    if width % num_heads:
        raise ValueError(f"d_model is {width} and decoder_attention_heads {num_heads}; heads must divide it")
    attention = AttentionSpec(
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=width // num_heads,
        bias=True,
        key_bias=False,
        output_bias=True,
        rope=None,
    )
    first, second = (tuple(range(half, 2 * num_layers, 2)) for half in (0, 1))  # to tokens, to the clip
    spec = ModelSpec(
        architecture=reader.architecture,
        vocab_size=reader.require("vocab_size"),
        hidden_size=width,
        num_hidden_layers=2 * num_layers,
        max_position_embeddings=reader.get("max_target_positions", 448),
        attention=attention,
        mlp=MlpSpec(intermediate_size=reader.require("decoder_ffn_dim"), hidden_act=act, bias=True, gated=False),
        without_mlp=first,
        sound=sound,
        learned_positions=True,
        norm=NormSpec(kind="layer", eps=_EPS, bias=True),
        tie_word_embeddings=True,
        cache_groups=(CacheGroup(kind="full", layers=first), CacheGroup(kind="cross", layers=second)),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec


def _weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    sound = spec.sound
    assert sound is not None, "Whisper hears"
    both, weight = tensors.WEIGHT_AND_BIAS, tensors.WEIGHT
    attention = {f"{part}_proj": ours for part, ours in zip(("q", "v", "out"), "qvo", strict=True)}
    rules: list[Rule] = [
        Rule(source=f"{_DECODER}embed_tokens.weight", target="embed.weight"),
        Rule(source=f"{_DECODER}embed_positions.weight", target="positions.weight"),
        *tensors.named_rules(_DECODER, "", {"layer_norm": "norm"}, parts=both),
    ]

    def layer(theirs: str, ours: str, names: Mapping[str, str], parts: tuple[str, ...] = both) -> None:
        rules.extend(tensors.named_rules(theirs, ours, names, parts=parts))

    for i in range(sound.num_readers):
        theirs, own, across = f"{_DECODER}layers.{i}.", f"layers.{2 * i}.", f"layers.{2 * i + 1}."
        layer(theirs, own, {"self_attn_layer_norm": "attention_norm"})
        layer(f"{theirs}self_attn.", f"{own}attention.", attention)
        layer(f"{theirs}self_attn.", f"{own}attention.", {"k_proj": "k"}, weight)
        layer(theirs, across, {"encoder_attn_layer_norm": "attention_norm", "final_layer_norm": "mlp_norm"})
        layer(f"{theirs}encoder_attn.", f"{across}attention.", {"q_proj": "q", "out_proj": "o"})
        layer(theirs, across, {"fc1": "mlp.up", "fc2": "mlp.down"})
        layer(f"{theirs}encoder_attn.", f"{PREFIX}readers.{i}.", {"v_proj": "v"})
        layer(f"{theirs}encoder_attn.", f"{PREFIX}readers.{i}.", {"k_proj": "k"}, weight)
    return (*rules, *encoder_rules(sound, _ENCODER))


def encoder_rules(sound: SoundSpec, source: str) -> tuple[Rule, ...]:
    """Every parameter of an encoder, and the tensor it comes from. source: the prefix of these."""
    both, layers = tensors.WEIGHT_AND_BIAS, tuple(range(sound.num_layers))
    inside = {
        "self_attn_layer_norm": "attention_norm",
        "self_attn.q_proj": "q",
        "self_attn.v_proj": "v",
        "self_attn.out_proj": "o",
        "final_layer_norm": "mlp_norm",
        "fc1": "up",
        "fc2": "down",
    }
    around = {"conv1": "narrow", "conv2": "wide", "layer_norm": "norm"}
    theirs, ours = f"{source}layers.{{i}}.", f"{PREFIX}layers.{{i}}."
    return (
        *tensors.named_rules(source, PREFIX, around, parts=both),
        Rule(source=f"{source}embed_positions.weight", target=f"{PREFIX}positions.weight"),
        *tensors.named_rules(theirs, ours, inside, layers, both),
        *tensors.named_rules(theirs, ours, {"self_attn.k_proj": "k"}, layers, tensors.WEIGHT),
    )


FAMILIES = {
    "WhisperForConditionalGeneration": Family(
        read=_spec,
        weight_rules=_weight_rules,
        harmless=lambda spec: ("proj_out.weight",),
        models="Whisper tiny to large-v3, turbo",
        notes="[transcribes sounds](../guides/sounds.md)",
    )
}
