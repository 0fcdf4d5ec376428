"""VoxtralForConditionalGeneration: Llama's decoder, and Whisper's encoder, whose states are embeddings of tokens.

    states = encoder of each window of 30 s;  embedding = project(gelu(project(some states side by side)))

A clip is whole windows, the last filled with silence, and no window hears another. Windows of padding are not computed.
Source: Liu et al. 2025 (Voxtral); keys and defaults as in Hugging Face's VoxtralConfig.
"""

import dataclasses

import jax
import jax.numpy as jnp

from checkpoints.rules import Rule
from ferrum_jax.models.families import llama, tensors
from ferrum_jax.models.families.config_reader import ConfigReader, part_reader
from ferrum_jax.models.families.text_part import in_language_model, text_part_from, with_towers
from ferrum_jax.models.families.whisper import PREFIX, WhisperEncoder, encoder_rules
from ferrum_jax.models.layers.linear import Linear
from ferrum_jax.models.layers.segment_attention import map_tiles, num_real_tiles
from ferrum_jax.models.spec import ModelSpec, SoundSpec

_TOWER, _PROJECTOR = "audio_tower.", "multi_modal_projector."
_OF_SOUNDS = ("audio_config", "audio_token_id", "hidden_size", "vocab_size")
_TEXT = dataclasses.replace(
    llama.FAMILIES["LlamaForCausalLM"],
    defaults={
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000.0,
        "head_dim": 128,
    },
)


class WindowedEncoder(WhisperEncoder):
    """Whisper's encoder of each window, with the projector; its weights are zeros until others are bound."""

    def __init__(self, spec: SoundSpec, *, dtype: jnp.dtype | str = jnp.float32) -> None:
        super().__init__(spec, dtype=dtype)
        self.spec = spec
        self.up = Linear(spec.hidden_size * spec.stacked, spec.out_size, dtype=jnp.dtype(dtype), rngs=None)
        self.down = Linear(spec.out_size, spec.out_size, dtype=jnp.dtype(dtype), rngs=None)

    def __call__(  # type: ignore[override]
        self,
        frames: jax.Array,  # [frames, mels] of whole windows
        segments: jax.Array,  # [tokens] int32: those of a window have the same, 0 is padding behind
    ) -> jax.Array:  # [tokens, out]
        windows = frames.reshape(-1, self.spec.chunk_frames, frames.shape[1])
        found = map_tiles(self._window, num_real_tiles(segments.reshape(len(windows), -1)), windows)
        return found.reshape(len(segments), -1)

    def _window(self, frames: jax.Array) -> jax.Array:  # [frames of one window, mels] -> [tokens, out]
        states = super().__call__(frames)
        side_by_side = states.reshape(-1, states.shape[1] * self.spec.stacked)
        return self.down(self.act(self.up(side_by_side)))


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(projector_hidden_act="gelu")
    text = text_part_from(reader, _OF_SOUNDS, _TEXT)
    return dataclasses.replace(text, sound=_sound_spec(reader.config.get("audio_config"), text.hidden_size))


def _sound_spec(config: object, width: int) -> SoundSpec:
    """SoundSpec of an `audio_config`. width: of the text model. Raises ValueError naming what is not understood."""
    reader = part_reader(config, "audio_config")
    reader.leave("vocab_size", "dropout", "layerdrop", "activation_dropout")
    reader.only(scale_embedding=False, activation_function="gelu")
    hidden, inner = reader.get("hidden_size", 1280), reader.get("intermediate_size", 5120)
    heads, positions = reader.get("num_attention_heads", 20), reader.get("max_source_positions", 1500)
    reader.only(num_key_value_heads=heads, head_dim=hidden // heads)
    if inner % hidden or positions % (inner // hidden):
        raise ValueError(
            f"audio_config's intermediate_size is {inner}, hidden_size {hidden} and max_source_positions {positions}; "
            "the states of a window are put side by side to as many values as intermediate_size says, and none is left"
        )
    spec = SoundSpec(
        tower="voxtral",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=reader.get("num_hidden_layers", 32),
        num_heads=heads,
        num_mels=reader.get("num_mel_bins", 128),
        num_positions=positions,
        out_size=width,
        chunk_frames=2 * positions,
        window_chunks=1,
        stacked=inner // hidden,
    )
    reader.finish()
    return spec


def _sound_rules(sound: SoundSpec) -> tuple[Rule, ...]:
    names = {"linear_1": "up", "linear_2": "down"}
    projector = tensors.named_rules(_PROJECTOR, PREFIX, names, parts=tensors.WEIGHT)
    return (*encoder_rules(sound, _TOWER), *projector)


FAMILIES = {
    "VoxtralForConditionalGeneration": with_towers(
        _TEXT,
        _spec,
        sound_rules=_sound_rules,
        of_sounds=(f"{_TOWER}*", f"{_PROJECTOR}*"),
        rename=in_language_model,
        models="Voxtral Mini and Small",
        notes="[with sounds](../guides/sounds.md#sounds-in-prompts), where the folder has a tokenizer.json",
    )
}
