"""Ministral3ForCausalLM, and the text part of Mistral3ForConditionalGeneration, which is a Mistral or a Ministral 3.

Ministral 3 is Mistral's decoder with YaRN, whose queries far from the start weigh sharper.
Source: Mistral AI 2025 (Mistral Small 3.1, Ministral 3); keys as in Hugging Face's configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.bounds import check_number, shown
from ferrum_jax.models.config_reader import ConfigReader, window_within
from ferrum_jax.models.llama import mistral_spec_from_config
from ferrum_jax.models.plain import all_windowed, attention_from, norm_from, spec_from
from ferrum_jax.models.rope_reader import mapping, rope_from
from ferrum_jax.models.text_part import text_part_from
from ferrum_jax.spec import ModelSpec, RopeSpec, Temperature

_MAX_POSITIONS = 262144
# Keys of Mistral3ForConditionalGeneration that concern images alone.
_OF_IMAGES = (
    *("vision_config", "image_token_index", "image_token_id", "multimodal_projector_bias", "projector_hidden_act"),
    *("spatial_merge_size", "vision_feature_layer"),
)
_BETA = "llama_4_scaling_beta"
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Ministral 3 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    rope, temperature = rope_and_temperature(reader, max_positions)
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 8),
        head_dim=reader.get("head_dim", 128),
        rope=rope,
        temperature=temperature,
    )
    return spec_from(
        reader,
        "Ministral3ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        norm=norm_from(reader, 1e-5),
        cache_groups=all_windowed(reader, window_within(reader, max_positions)),
    )


def text_part_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of the text part of a Mistral or Ministral 3 that sees images; it is served as a text model.

    Raises ValueError naming what is missing or not understood.
    """
    return text_part_from(config, _OF_IMAGES, _text_spec)


def _text_spec(config: Mapping[str, Any]) -> ModelSpec:
    kind = config.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise ValueError(f"text_config's model_type is {shown(kind, repr)}; supported are {sorted(_TEXTS)}")
    return _TEXTS[kind](config)


def rope_and_temperature(
    reader: ConfigReader, max_positions: int, turning_share: float = 1.0
) -> tuple[RopeSpec, Temperature | None]:
    """The rope, and the temperature that the same object describes. turning_share: of a head, as it may say again."""
    values = mapping(reader, "rope_parameters") or dict(_ROPE)
    values.pop("max_position_embeddings", None)  # repeats the model's
    if (share := values.pop("partial_rotary_factor", turning_share)) != turning_share:
        raise ValueError(f"partial_rotary_factor is {shown(share)}; the sizes of this model say {turning_share:g}")
    beta = values.pop(_BETA, None)
    rope = rope_from(ConfigReader({"rope_parameters": values}), max_positions)
    if beta is None:
        return rope, None
    check_number(_BETA, beta)
    length = rope.original_max_position_embeddings or max_positions
    return rope, Temperature(scale=float(beta), length=length)


_TEXTS = {"mistral": mistral_spec_from_config, "ministral3": spec_from_config}
