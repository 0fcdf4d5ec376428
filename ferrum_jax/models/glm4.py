"""Glm4ForCausalLM, Glm4MoeForCausalLM and Glm4MoeLiteForCausalLM: GLM-4-0414, GLM-4.5 to 4.7, and GLM-4.7-Flash.

The last two have experts chosen as in DeepSeek-V3, and the last its latent attention; in the others half of each head
turns. GLM-4 turns neighbours together, has norms on both sides of attention and MLP, and joins gate and up in one
tensor. The layers that predict several tokens are not served.
Source: GLM Team 2024, 2025; keys as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.deepseek import experts_from, latent_attention_from
from ferrum_jax.models.plain import attention_from, layers_where, norm_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec, QkNorm, RopeSpec

_MAX_POSITIONS = 131072
_LITE_MAX_POSITIONS = 202752
_NORMS = decoder.BEFORE | {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a GLM-4-0414 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 2),
        head_dim=reader.get("head_dim", 128),
        bias=bool(reader.get("attention_bias", True)),
        rope=dataclasses.replace(_rope(reader), interleaved=True),
    )
    norm = norm_from(reader, 1.5625e-7, after=True)
    return spec_from(reader, "Glm4ForCausalLM", max_positions=_MAX_POSITIONS, attention=attention, norm=norm)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a GLM-4, and the Hugging Face tensor it comes from."""
    return (*decoder.frame_rules(spec, _NORMS), *decoder.attention_rules(spec), *decoder.fused_mlp_rules(spec))


def moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a GLM-4.5 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.get("num_nextn_predict_layers", None)  # layers behind the last, which `moe_harmless` leaves over
    norm = QkNorm() if reader.get("use_qk_norm", False) else None
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 8),
        bias=bool(reader.get("attention_bias", False)),
        qk_norm=norm,
        rope=_rope(reader),
    )
    return spec_from(
        reader,
        "Glm4MoeForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        experts=_experts(reader),
        norm=norm_from(reader, 1e-5),
    )


def _rope(reader: ConfigReader) -> RopeSpec:
    return rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_partial=0.5)


def _experts(reader: ConfigReader) -> ExpertsSpec | None:
    dense, num_layers = reader.get("first_k_dense_replace", 1), reader.require("num_hidden_layers")
    return experts_from(
        reader,
        tuple(range(dense, num_layers)),
        num_experts=reader.get("n_routed_experts", 128),
        intermediate_size=reader.get("moe_intermediate_size", 1408),
        shared_intermediate_size=reader.get("moe_intermediate_size", 1408) * reader.get("n_shared_experts", 1),
    )


def moe_weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a GLM-4.5, and the Hugging Face tensor it comes from."""
    body = (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *decoder.mlp_rules(spec))
    return (*body, *decoder.expert_rules(spec, shared="shared_experts"))


def lite_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a GLM-4.7-Flash config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.get("num_nextn_predict_layers", None)  # layers behind the last, which are left over
    reader.only(topk_method="noaux_tc")
    num_layers, dense = reader.require("num_hidden_layers"), reader.get("first_k_dense_replace", 1)
    kinds = reader.get("mlp_layer_types", ["dense"] * dense + ["sparse"] * (num_layers - dense))
    if len(kinds) != num_layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"mlp_layer_types is {shown(kinds)}; it must name 'dense' or 'sparse' for {num_layers} layers")
    width = reader.get("moe_intermediate_size", 1536)
    return spec_from(
        reader,
        "Glm4MoeLiteForCausalLM",
        max_positions=_LITE_MAX_POSITIONS,
        attention=latent_attention_from(
            reader, _LITE_MAX_POSITIONS, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256
        ),
        experts=experts_from(
            reader,
            layers_where(kind == "sparse" for kind in kinds),
            num_experts=reader.get("n_routed_experts", 64),
            num_experts_per_tok=reader.get("num_experts_per_tok", 4),
            routed_scaling_factor=float(reader.get("routed_scaling_factor", 1.8)),
            intermediate_size=width,
            shared_intermediate_size=width * reader.get("n_shared_experts", 1),
        ),
        norm=norm_from(reader, 1e-5),
    )
