"""Qwen3.5 and Qwen3.6, dense and of experts: Qwen3-Next's decoder, with a projection for each part of a Gated DeltaNet.

Their folders hold models that see images: Qwen3-VL's tower without deepstack, and its rotary positions. A text model
that was trained on has neither. A layer predicts one token more, for drafts.
Source: the model cards of Qwen3.5 (Qwen, 2026); keys as in Hugging Face's Qwen3_5TextConfig, Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models.families import qwen3_next, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.mtp import MtpLayers, rules_above
from ferrum_jax.models.families.plain import experts_from, mlp_from
from ferrum_jax.models.families.qwen3_vl import with_sections, with_tower
from ferrum_jax.models.families.rope_reader import mapping
from ferrum_jax.models.families.text_part import seeing, text_part_from
from ferrum_jax.models.families.vision_tower import tower_rules
from ferrum_jax.models.spec import GatedDeltaSpec, ModelSpec

_TOWER = "model.visual."
_SECTIONS = ("mrope_section", "mrope_interleaved")
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what tells positions of images from those of text."""
    rope = mapping(ConfigReader(config), "rope_parameters")
    return {**config, "rope_parameters": {key: value for key, value in rope.items() if key not in _SECTIONS}}


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    reader.only(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    # layers that predict one token more are counted by `Family.mtp`; no layer of this family is dense
    reader.leave("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
    recurrence = qwen3_next.recurrence_from(reader, grouped=False)
    return qwen3_next.hybrid_spec(reader, recurrence=recurrence, **family)


def _moe(reader: ConfigReader) -> ModelSpec:
    """All layers have experts."""
    reader.leave("intermediate_size")  # of dense layers, which there are none of
    width = reader.get("moe_intermediate_size", 512)
    shared = reader.get("shared_expert_intermediate_size", 512)
    sizes = {"intermediate_size": width, "shared_intermediate_size": shared, "norm_topk_prob": True}
    experts = experts_from(reader, reader.get("num_experts", 256), **sizes)
    return _spec(reader, experts=experts, mlp=mlp_from(reader, intermediate_size=width))


def _whole(text: Family, reader: ConfigReader) -> ModelSpec:
    """One that sees images, which one without a `vision_config` does not."""
    spec, config = text_part_from(reader, _OF_IMAGES, text), reader.config
    if not config.get("vision_config") or config.get("language_model_only"):
        return spec
    rope = ConfigReader(mapping(ConfigReader(config["text_config"]), "rope_parameters"))
    return with_tower(with_sections(spec, rope.get("mrope_section", [11, 11, 10])), config)


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """All experts of a layer may be two tensors."""
    own, layers = spec.recurrence, spec.state_layers
    assert isinstance(own, GatedDeltaSpec)
    keys = own.num_key_heads * own.key_head_dim
    parts = {
        "q": TensorSlice(stop=keys),
        "k": TensorSlice(start=keys, stop=2 * keys),
        "v": TensorSlice(start=2 * keys),
    }
    alone = {f"in_proj_{part}.weight": f"{part}_heads.weight" for part in "zba"}
    rules = (
        *tensors.joined(tensors.weight_rules(spec), spec),
        *qwen3_next.recurrent_rules(spec, qwen3_next.RECURRENT | alone),
        *tensors.parts_per_layer("linear_attn.in_proj_qkv.weight", "attention.{part}_heads.weight", layers, parts),
    )
    return rules_above(rules, spec)


def _seeing(text: Family) -> Family:
    return seeing(
        text,
        functools.partial(_whole, text),
        functools.partial(tower_rules, source=_TOWER),
        of_tower=(_TOWER + "*",),
        models=text.models.removesuffix(", text saved alone"),
        notes=f"[with images and videos](../guides/images.md); {text.notes}",
    )


_DEFAULTS = {key: qwen3_next.DEFAULTS[key] for key in ("max_position_embeddings", "head_dim", "partial_rotary_factor")}
_DENSE = Family(
    read=_spec,
    defaults=_DEFAULTS | {"num_key_value_heads": 4},
    respell=_without_sections,
    weight_rules=_rules,
    harmless=with_unserved("mtp.*"),
    mtp=MtpLayers(keys=("mtp_num_hidden_layers",), most=1),
    models="Qwen3.5, Qwen3.6, text saved alone",
    notes=ONE_TOKEN,
)
_EXPERTS = dataclasses.replace(
    _DENSE,
    read=_moe,
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts_per_tok": 8},
    models="Qwen3.5, Qwen3.6 with experts, text saved alone",
)
FAMILIES = {
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5ForConditionalGeneration": _seeing(_DENSE),
    "Qwen3_5MoeForCausalLM": _EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _seeing(_EXPERTS),
}
