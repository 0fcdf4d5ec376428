"""Qwen3-Next, Qwen3.5 and Qwen3.6, dense and of experts: decoders in which most layers have a Gated DeltaNet.

Attention has an output gate and turns a quarter of each head; layers with experts have one more that every token goes
to, behind a gate. Norms are 1 + w, but for the one inside the Gated DeltaNet. A layer predicts one token more, for
drafts. Qwen3.5 has a projection for each part of a Gated DeltaNet. Its folders hold models that see images: Qwen3-VL's
tower without deepstack, and its rotary positions. A text model that was trained on has neither.
Source: the model cards of Qwen3-Next-80B-A3B (Qwen, 2025) and Qwen3.5 (Qwen, 2026); keys as in Hugging Face's
Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import IN_KERNELS, ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.mtp import MtpLayers, rules_above
from ferrum_jax.models.families.plain import attention_from, experts_from, hybrid_groups, mlp_from, norm_from, spec_from
from ferrum_jax.models.families.qwen import experts_of
from ferrum_jax.models.families.qwen3_vl import over, with_sections, with_tower
from ferrum_jax.models.families.rope_reader import mapping
from ferrum_jax.models.families.text_part import text_part_from
from ferrum_jax.models.spec import GatedDeltaSpec, ModelSpec, QkNorm

# What Gated DeltaNets of all projections have, ours by the checkpoint's name.
_RECURRENT = {
    "conv1d.weight": "conv",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "out_proj.weight": "o.weight",
}
_NEXT_DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
_SECTIONS = ("mrope_section", "mrope_interleaved")
_OF_IMAGES = (
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    "language_model_only",
)
_DEFAULTS = {key: _NEXT_DEFAULTS[key] for key in ("max_position_embeddings", "head_dim", "partial_rotary_factor")}


def _next(reader: ConfigReader) -> ModelSpec:
    if reader.flag("use_sliding_window"):
        raise ValueError("use_sliding_window is true; this architecture has no layers with a window")
    shared = reader.get("shared_expert_intermediate_size", 512)
    experts = experts_of(reader, other_count="", shared_intermediate_size=shared)
    return _hybrid(reader, experts=experts, recurrence=_recurrence(reader))


def _hybrid(reader: ConfigReader, **family: Any) -> ModelSpec:
    """Gated attention in the last of every full_attention_interval layers, if layer_types does not say otherwise."""
    layers = range(reader.require("num_hidden_layers"))
    interval = reader.get("full_attention_interval", 4)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias", gate=True, qk_norm=QkNorm()),
        norm=norm_from(reader, zero_centred=True),
        cache_groups=hybrid_groups(reader.get("layer_types", kinds), len(layers)),
        **family,
    )


def _recurrence(reader: ConfigReader, **family: Any) -> GatedDeltaSpec:
    """The sizes of Gated DeltaNets."""
    return GatedDeltaSpec(
        num_key_heads=reader.get("linear_num_key_heads", 16),
        num_value_heads=reader.get("linear_num_value_heads", 32),
        key_head_dim=reader.get("linear_key_head_dim", 128),
        value_head_dim=reader.get("linear_value_head_dim", 128),
        conv_kernel_dim=reader.get("linear_conv_kernel_dim", 4),
        **family,
    )


def _next_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    names = _RECURRENT | {"in_proj_qkvz.weight": "qkvz.weight", "in_proj_ba.weight": "ba.weight"}
    return rules_above((*tensors.weight_rules(spec), *_recurrent_rules(spec, names)), spec)


def _recurrent_rules(spec: ModelSpec, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Tensors of Gated DeltaNets that are parameters as they are. names: ours by theirs."""
    return tensors.named_rules("model.layers.{i}.linear_attn.", "layers.{i}.attention.", names, spec.state_layers)


def _without_sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what tells positions of images from those of text."""
    rope = mapping(ConfigReader(config), "rope_parameters")
    return {**config, "rope_parameters": {key: value for key, value in rope.items() if key not in _SECTIONS}}


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    reader.only(attn_output_gate=True, output_gate_type="swish", mamba_ssm_dtype="float32")
    # layers that predict one token more are counted by `Family.mtp`; no layer of this family is dense
    reader.leave("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
    recurrence = _recurrence(reader, grouped=False)
    return _hybrid(reader, recurrence=recurrence, **family)


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
    parts = tensors.in_turn({"q": keys, "k": keys, "v": own.output_size})
    alone = {f"in_proj_{part}.weight": f"{part}_heads.weight" for part in "zba"}
    rules = (
        *tensors.joined(tensors.weight_rules(spec), spec),
        *_recurrent_rules(spec, _RECURRENT | alone),
        *tensors.parts_per_layer("linear_attn.in_proj_qkv.weight", "attention.{part}_heads.weight", layers, parts),
    )
    return rules_above(rules, spec)


def _seeing(text: Family) -> Family:
    return over(
        text,
        _whole,
        models=text.models.removesuffix(", text saved alone"),
        notes=f"[with images and videos](../guides/images.md); {text.notes}",
    )


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
    "Qwen3NextForCausalLM": Family(
        read=_next,
        defaults=_NEXT_DEFAULTS | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        weight_rules=_next_rules,
        harmless=with_unserved("mtp.*"),
        mtp=MtpLayers(default=1, most=1),  # whose published config counts none
        models="Qwen3-Next",
        notes=f"Gated DeltaNet layers, {IN_KERNELS}; {ONE_TOKEN}",
    ),
    "Qwen3_5ForCausalLM": _DENSE,
    "Qwen3_5ForConditionalGeneration": _seeing(_DENSE),
    "Qwen3_5MoeForCausalLM": _EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _seeing(_EXPERTS),
}
