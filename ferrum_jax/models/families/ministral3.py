"""Ministral3ForCausalLM, and Mistral3ForConditionalGeneration: a Mistral or a Ministral 3 that sees images by a tower.

Ministral 3 is Mistral's decoder with YaRN, whose queries far from the start weigh sharper. Tokens of an image attend to
the past alone, as text does.
Source: Mistral AI 2025 (Mistral Small 3.1, Ministral 3); keys as in Hugging Face's configs.
"""

import dataclasses

from ferrum_jax.models.families import mistral, pixtral
from ferrum_jax.models.families.bounds import check_number, shown
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, attention_from, spec_from
from ferrum_jax.models.families.rope_reader import mapping, rope_from
from ferrum_jax.models.families.text_part import IMAGES, in_language_model, text_part_from, with_towers
from ferrum_jax.models.spec import ModelSpec, RopeSpec, Temperature

# Keys of Mistral3ForConditionalGeneration that concern images alone; those that its tower needs are read for it.
OF_IMAGES = (
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


def _spec(reader: ConfigReader) -> ModelSpec:
    rope, temperature = rope_and_temperature(reader)
    attention = attention_from(reader, rope=rope, temperature=temperature)
    return spec_from(reader, attention=attention, cache_groups=all_windowed(reader, window_within(reader)))


def rope_and_temperature(reader: ConfigReader, turning_share: float = 1.0) -> tuple[RopeSpec, Temperature | None]:
    """The rope, and the temperature that the same object describes. turning_share: of a head, as it may say again."""
    longest = reader.require("max_position_embeddings")
    values = mapping(reader, "rope_parameters") or dict(_ROPE)
    values.pop("max_position_embeddings", None)  # repeats the model's
    if (share := values.pop("partial_rotary_factor", turning_share)) != turning_share:
        raise ValueError(f"partial_rotary_factor is {shown(share)}; the sizes of this model say {turning_share:g}")
    beta = values.pop(_BETA, None)
    rope = rope_from(ConfigReader({"rope_parameters": values}), longest)
    if beta is None:
        return rope, None
    check_number(_BETA, beta)
    return rope, Temperature(scale=float(beta), length=rope.original_max_position_embeddings or longest)


def _text(reader: ConfigReader) -> ModelSpec:
    kind = reader.config.get("model_type", "mistral")
    if not isinstance(kind, str) or kind not in _TEXTS:
        raise ValueError(f"text_config's model_type is {shown(kind, repr)}; supported are {sorted(_TEXTS)}")
    return _TEXTS[kind].spec_from_config(reader.config, reader.architecture)


_MINISTRAL3 = Family(
    read=_spec,
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    models="Ministral 3, text",
)
_TEXTS = {"mistral": mistral.FAMILIES["MistralForCausalLM"], "ministral3": _MINISTRAL3}
_EITHER = dataclasses.replace(_MINISTRAL3, read=_text, defaults={})
FAMILIES = {
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Mistral3ForConditionalGeneration": with_towers(
        _EITHER,
        lambda reader: pixtral.with_tower(text_part_from(reader, OF_IMAGES, _EITHER, may_tie=True), reader.config),
        pixtral.tower_rules,
        of_tower=IMAGES,
        rename=in_language_model,
        models="Mistral Small 3.1 and 3.2, Ministral 3",
        notes="[with images](../guides/images.md)",
    ),
}
