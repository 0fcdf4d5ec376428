"""Qwen3ASRForConditionalGeneration: Qwen3's decoder, and an encoder of sounds whose states are embeddings of tokens.

    chunk of 100 frames -> three convolutions that halve mels and frames -> conv_out -> + positions within the chunk
    per layer:  x += attention(norm(x));  x += mlp(norm(x));      embedding = project(gelu(project(norm(x))))

A clip's positions attend to those of their window, some chunks. Its last chunk is filled with zeros, and positions of
these alone are dropped. All is computed tile by tile, and tiles of padding are not. Tokens of sounds have the places of
others, so rotary positions with sections are plain ones.
Source: Shi et al. 2026 (Qwen3-ASR); keys and defaults as in Hugging Face's Qwen3ASRConfig, and in Qwen's own files.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.rules import Rule, in_thinker
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.models.families import qwen, tensors
from ferrum_jax.models.families.config_reader import ConfigReader, part_reader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.text_part import text_part_from, with_towers
from ferrum_jax.models.families.whisper import PREFIX
from ferrum_jax.models.layers.bidirectional_layer import BidirectionalLayer, heads_first, in_real_tiles
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.mlp import activation_of
from ferrum_jax.models.layers.norm import LayerNorm
from ferrum_jax.models.layers.segment_attention import in_tiles, map_tiles, num_real_tiles, tile_of
from ferrum_jax.models.spec import ModelSpec, SoundSpec

_EPS = 1e-5
_SLOWEST = 10000.0  # of a position's sines
TILE_CHUNKS = 8  # whose convolutions are computed together
_TOWER, _PROJECTOR = "model.audio_tower.", "model.multi_modal_projector."
_THINKER = "thinker_config"  # under which Qwen's own files have all but their languages
# Keys that say how sounds stand in a prompt, and those of models that say when a word was said.
_OF_SOUNDS = (
    *("audio_config", "audio_token_id", "audio_start_token_id", "audio_end_token_id", "user_token_id"),
    *("support_languages", "timestamp_token_id", "token_classification_bias"),
)
_SECTIONS = ("mrope_section", "mrope_interleaved", "interleaved")


class HalvingConvolution(nnx.Module):
    """A convolution over 3 x 3 neighbours, every second of both. weight [out, in, 3, 3] as in checkpoints."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = True, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((num_out, num_in, 3, 3), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:  # [chunks, in, mels, frames] -> [chunks, out, mels/2, frames/2]
        weight = self.weight[...]
        y = jax.lax.conv_general_dilated(
            x.astype(weight.dtype), weight, (2, 2), ((1, 1), (1, 1)), preferred_element_type=jnp.float32
        )
        if self.bias is not None:
            y += self.bias[...].astype(jnp.float32)[None, :, None, None]
        return y.astype(weight.dtype)


class AudioLayer(BidirectionalLayer):
    """A layer whose positions attend to those of their window."""

    def __call__(self, x: jax.Array, segments: jax.Array) -> jax.Array:  # [tiles, t, D], [tiles, t] -> [tiles, t, D]
        return in_real_tiles(lambda x: heads_first(self.heads(x)), self.mixed, x, segments)


class ChunkedEncoder(nnx.Module):
    """A whole encoder with its projector; its weights are zeros until others are bound."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        dtype, D, C = jnp.dtype(dtype), spec.hidden_size, spec.conv_channels
        self.spec, self.act = spec, activation_of(spec.hidden_act)
        self.convolutions = nnx.List([HalvingConvolution(num_in, C, dtype=dtype) for num_in in (1, C, C)])
        self.convolved = Linear(C * _halved(spec.num_mels), D, dtype=dtype, rngs=None)
        self.layers = nnx.List([AudioLayer(spec, eps=_EPS, dtype=dtype) for _ in range(spec.num_layers)])
        self.norm = LayerNorm(D, eps=_EPS, dtype=dtype)
        self.up = Linear(D, D, bias=True, dtype=dtype, rngs=None)
        self.down = Linear(D, spec.out_size, bias=True, dtype=dtype, rngs=None)

    def __call__(
        self,
        frames: jax.Array,  # [frames, mels] of whole chunks
        segments: jax.Array,  # [positions] int32, ascending; those of a window have the same, 0 is padding behind
    ) -> jax.Array:  # [positions, out]
        chunks = frames.reshape(-1, self.spec.chunk_frames, frames.shape[1])
        own = segments.reshape(len(chunks), -1)[:, 0]
        tile = min(len(chunks), TILE_CHUNKS)
        x = map_tiles(self._start, num_real_tiles(in_tiles(own, tile)), in_tiles(chunks, tile))
        x = x.reshape(-1, x.shape[-1])[: len(segments)]
        tile = tile_of(len(segments))
        x, tiles = in_tiles(x, tile), in_tiles(segments, tile)
        for layer in self.layers:
            x = layer(x, tiles)
        found = map_tiles(self._projected, num_real_tiles(tiles), x)
        return found.reshape(-1, found.shape[-1])[: len(segments)]

    def _start(self, chunks: jax.Array) -> jax.Array:  # [chunks, frames, mels] -> [chunks, positions, D]
        x = jnp.swapaxes(chunks, 1, 2)[:, None]
        for convolution in self.convolutions:
            x = jax.nn.gelu(convolution(x), approximate=False)
        positions = x.shape[3]
        x = self.convolved(jnp.moveaxis(x, 3, 1).reshape(len(chunks) * positions, -1))
        x = x.reshape(len(chunks), positions, -1)
        return x + jnp.asarray(sines(positions, x.shape[2]), x.dtype)[None]

    def _projected(self, x: jax.Array) -> jax.Array:  # [t, D] -> [t, out]
        return self.down(self.act(self.up(self.norm(x))))


def _halved(count: int) -> int:
    """The number of mels or frames after three halving convolutions."""
    return ceil_div(count, 8)


def sines(num_positions: int, width: int) -> np.ndarray:  # [positions, D] float32
    """Sines of each position in a chunk, then cosines. Source: Vaswani et al. 2017, section 3.5."""
    half = width // 2
    step = np.float32(np.log(_SLOWEST) / (half - 1))
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * np.exp(-step * np.arange(half, dtype=np.float32))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _respelled(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config as the reference writes it, where it is one of Qwen's own."""
    inside = config.get(_THINKER)
    if not isinstance(inside, Mapping):
        return config
    return {**inside, **{key: value for key, value in config.items() if key != _THINKER}}


def _text(reader: ConfigReader) -> ModelSpec:
    """The text model, whose rotary positions are plain whether its config has sections or not."""
    config = {"tie_word_embeddings": True, **reader.config}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), Mapping):
            config[key] = {name: value for name, value in config[key].items() if name not in _SECTIONS}
    return qwen.QWEN3.spec_from_config(config, reader.architecture)


_TEXT = Family(read=_text, models=qwen.QWEN3.models)


def _spec(reader: ConfigReader) -> ModelSpec:
    text = text_part_from(reader, _OF_SOUNDS, _TEXT)
    return dataclasses.replace(text, sound=_sound_spec(reader.config.get("audio_config"), text.hidden_size))


def _sound_spec(config: object, width: int) -> SoundSpec:
    """SoundSpec of an `audio_config`. width: of the text model. Raises ValueError naming what is not understood."""
    reader = part_reader(config, "audio_config")
    reader.leave("dropout", "activation_dropout", "conv_chunksize", "max_source_positions", "max_position_embeddings")
    reader.leave("num_hidden_layers")
    reader.only(n_window=50, scale_embedding=False)
    frames, window = 2 * reader.get("n_window", 50), reader.get("n_window_infer", 800)
    if window % frames:
        raise ValueError(f"n_window_infer is {window}; it must be a multiple of {frames}, the frames of a chunk")
    spec = SoundSpec(
        tower="qwen_sound",
        hidden_size=reader.get("d_model", 1024),
        intermediate_size=reader.get("encoder_ffn_dim", 4096),
        num_layers=reader.get("encoder_layers", 24),
        num_heads=reader.get("encoder_attention_heads", 16),
        num_mels=reader.get("num_mel_bins", 128),
        num_positions=_halved(frames),
        out_size=reader.get("output_dim", 3584),
        chunk_frames=frames,
        window_chunks=window // frames,
        conv_channels=reader.get("downsample_hidden_size", 480),
        hidden_act=reader.get("activation_function", "gelu"),
    )
    reader.finish()
    if spec.hidden_size % 2 or spec.hidden_size < 4:
        raise ValueError(f"d_model is {spec.hidden_size}; it must be even, 4 or more, for sines and cosines")
    if spec.out_size != width:
        raise ValueError(f"audio_config's output_dim is {spec.out_size}, and the text's hidden_size is {width}")
    return spec


def _encoder_rules(sound: SoundSpec) -> tuple[Rule, ...]:
    both, layers = tensors.WEIGHT_AND_BIAS, tuple(range(sound.num_layers))
    inside = {
        "self_attn_layer_norm": "attention_norm",
        **{f"self_attn.{x}_proj": x for x in "qkv"},
        "self_attn.out_proj": "o",
        "final_layer_norm": "mlp_norm",
        "fc1": "up",
        "fc2": "down",
    }
    around = {**{f"conv2d{i + 1}": f"convolutions.{i}" for i in range(3)}, "ln_post": "norm"}
    return (
        *tensors.named_rules(_TOWER, PREFIX, around, parts=both),
        *tensors.named_rules(_TOWER, PREFIX, {"conv_out": "convolved"}, parts=tensors.WEIGHT),
        *tensors.named_rules(f"{_TOWER}layers.{{i}}.", f"{PREFIX}layers.{{i}}.", inside, layers, both),
        *tensors.named_rules(_PROJECTOR, PREFIX, {"linear_1": "up", "linear_2": "down"}, parts=both),
    )


_WHOLE = with_towers(
    _TEXT,
    _spec,
    sound_rules=_encoder_rules,
    of_sounds=(f"{_TOWER}*", f"{_PROJECTOR}*"),
    models="Qwen3-ASR 0.6B and 1.7B",
    notes="[with sounds](../guides/sounds.md)",
)
FAMILIES = {
    "Qwen3ASRForConditionalGeneration": dataclasses.replace(
        _WHOLE,
        respell=_respelled,
        harmless=lambda spec: (*_WHOLE.harmless(spec), *map(in_thinker, _WHOLE.harmless(spec))),
    )
}
