"""Qwen3.5 and Qwen3.6, dense and of experts: Qwen3-Next's decoder, with a projection for each part of a Gated DeltaNet.

Their folders hold models that see images: Qwen3-VL's tower without deepstack, and its rotary positions. A text model
that was trained on has neither. Layers that predict several tokens are left.
Source: the model cards of Qwen3.5 (Qwen, 2026); keys as in Hugging Face's Qwen3_5TextConfig, Qwen3_5MoeTextConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from checkpoints.rules import Rule, StoredTensor, TensorSlice
from ferrum_jax.models import decoder, qwen3_next
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import norm_from, spec_from
from ferrum_jax.models.qwen3_vl import with_sections, with_tower
from ferrum_jax.models.rope_reader import mapping
from ferrum_jax.models.text_part import text_part_from
from ferrum_jax.models.vision_tower import tower_rules
from ferrum_jax.spec import ExpertsSpec, GatedDeltaSpec, MlpSpec, ModelSpec

_MAX_POSITIONS = 32768  # where the config is silent
_TOWER = "model.visual."
_SECTIONS = ("mrope_section", "mrope_interleaved")
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of the text_config of a dense Qwen3.5. Raises ValueError naming what is not understood."""
    return _spec(_reader(config), "Qwen3_5ForCausalLM", num_kv_heads=4)


def moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The same of a Qwen3.5 whose layers all have experts."""
    reader = _reader(config)
    reader.get("intermediate_size", None)  # of dense layers, which there are none of
    width = reader.get("moe_intermediate_size", 512)
    experts = ExpertsSpec(
        layers=tuple(range(reader.require("num_hidden_layers"))),
        num_experts=reader.get("num_experts", 256),
        num_experts_per_tok=reader.get("num_experts_per_tok", 8),
        intermediate_size=width,
        shared_intermediate_size=reader.get("shared_expert_intermediate_size", 512),
        norm_topk_prob=True,
    )
    mlp = MlpSpec(intermediate_size=width, hidden_act=reader.get("hidden_act", "silu"))
    return _spec(reader, "Qwen3_5MoeForCausalLM", num_kv_heads=2, experts=experts, mlp=mlp)


def whole_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a dense Qwen3.5 that sees images, which one without a `vision_config` does not.

    Raises ValueError naming what is not understood.
    """
    return _whole(config, spec_from_config)


def moe_whole_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The same of a Qwen3.5 whose layers have experts."""
    return _whole(config, moe_spec_from_config)


def _whole(config: Mapping[str, Any], spec_from_text: Callable[[Mapping[str, Any]], ModelSpec]) -> ModelSpec:
    spec = text_part_from(config, _OF_IMAGES, spec_from_text)
    if not config.get("vision_config") or config.get("language_model_only"):
        return spec
    rope = ConfigReader(mapping(ConfigReader(config["text_config"]), "rope_parameters"))
    return with_tower(with_sections(spec, rope.get("mrope_section", [11, 11, 10])), config)


def _reader(config: Mapping[str, Any]) -> ConfigReader:
    """The config without what tells positions of images from those of text."""
    rope = mapping(ConfigReader(config), "rope_parameters")
    plain = {key: value for key, value in rope.items() if key not in _SECTIONS}
    reader = ConfigReader({**config, "rope_parameters": plain})
    reader.only(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"):
        reader.get(key, None)  # layers that predict several tokens are left; no layer of this family is dense
    return reader


def _spec(reader: ConfigReader, architecture: str, *, num_kv_heads: int, **family: Any) -> ModelSpec:
    """What both read alike."""
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    return spec_from(
        reader,
        architecture,
        max_positions=_MAX_POSITIONS,
        attention=qwen3_next.attention_from(reader, max_positions, num_kv_heads),
        recurrence=qwen3_next.recurrence_from(reader, grouped=False),
        norm=norm_from(reader, zero_centred=True),
        cache_groups=qwen3_next.hybrid_groups(reader),
        **family,
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter, and the Hugging Face tensor it comes from. All experts of a layer may be two tensors."""
    own, layers = spec.recurrence, spec.state_layers
    assert isinstance(own, GatedDeltaSpec)
    keys = own.num_key_heads * own.key_head_dim
    parts = {
        "q_heads.weight": TensorSlice(stop=keys),
        "k_heads.weight": TensorSlice(start=keys, stop=2 * keys),
        "v_heads.weight": TensorSlice(start=2 * keys),
    }
    alone = {f"in_proj_{part}.weight": f"{part}_heads.weight" for part in "zba"}
    return (
        *decoder.frame_rules(spec),
        *decoder.attention_rules(spec),
        *decoder.mlp_rules(spec),
        *(_joined(spec, rule) for rule in decoder.expert_rules(spec)),
        *qwen3_next.recurrent_rules(spec, qwen3_next.RECURRENT | alone),
        *(
            rule
            for name, part in parts.items()
            for rule in decoder.per_layer("linear_attn.in_proj_qkv.weight", f"attention.{name}", layers, part)
        ),
    )


def _joined(spec: ModelSpec, rule: Rule) -> Rule:
    """The rule of an expert's matrix, with the tensor that holds those of all of them."""
    if not rule.experts or spec.experts is None:
        return rule
    width, parameter = spec.experts.intermediate_size, rule.target.rpartition(".")[2]
    part = {"gate": TensorSlice(axis=1, stop=width), "up": TensorSlice(axis=1, start=width)}.get(parameter)
    name = "down_proj" if part is None else "gate_up_proj"
    return dataclasses.replace(rule, joined=StoredTensor(f"model.layers.{{i}}.mlp.experts.{name}", part))


def whole_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text part and of the tower, and the Hugging Face tensor it comes from."""
    text = tuple(rule.renamed(_of_part) for rule in weight_rules(spec))
    return (*text, *(() if spec.vision is None else tower_rules(spec.vision, _TOWER)))


def whole_harmless(spec: ModelSpec) -> tuple[str, ...]:
    """Patterns of tensors that the model does not need: of one that is served for text alone, the tower's."""
    text = map(_of_part, qwen3_next.harmless_tensors(spec))
    return (*text, *((_TOWER + "*",) if spec.vision is None else ()))


def _of_part(name: str) -> str:
    """The name that a tensor of a text model has beside those of images."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
