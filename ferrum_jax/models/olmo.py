"""Olmo2ForCausalLM, Olmo3ForCausalLM, OlmoeForCausalLM: Llama's decoder with norms over all heads of q and of k.

OLMo 2 and 3 norm what attention and MLP give, not what they are given. OLMo 3 has a window in three layers of four,
whose rope no scaling touches. OLMoE has experts in every layer and norms before.
Source: OLMo Team 2024 (OLMo 2), 2025 (OLMo 3); Muennighoff et al. 2024 (OLMoE); keys as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups, window_within
from ferrum_jax.models.plain import attention_from, every_nth_full, norm_from, spec_from
from ferrum_jax.models.rope_reader import ropes_by_kind
from ferrum_jax.spec import AttentionSpec, ExpertsSpec, ModelSpec, QkNorm

_MAX_POSITIONS = 2048


def olmo2_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an OLMo 2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    return spec_from(
        reader,
        "Olmo2ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=_attention(reader),
        norm=norm_from(reader, 1e-5, before=False, after=True),
    )


def olmo3_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an OLMo 3 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    num_layers = reader.require("num_hidden_layers")
    full, near = ropes_by_kind(reader, max_positions, default_theta=500000.0)
    attention = _attention(reader, rope=full)
    kinds = every_nth_full(reader, 4)
    groups = cache_groups(kinds, num_layers, window_within(reader, max_positions, 4096))
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return spec_from(
        reader,
        "Olmo3ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        other_attention=((windowed, dataclasses.replace(attention, rope=near)),),
        norm=norm_from(reader, 1e-5, before=False, after=True),
        cache_groups=groups,
    )


def olmoe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an OLMoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    if reader.get("clip_qkv", None) is not None:
        raise ValueError("clip_qkv is not null; q, k and v are not clipped here, and no released OLMoE clips them")
    return spec_from(
        reader,
        "OlmoeForCausalLM",
        max_positions=4096,
        attention=_attention(reader, max_positions=4096),
        experts=ExpertsSpec(
            layers=tuple(range(reader.require("num_hidden_layers"))),
            num_experts=reader.get("num_experts", 64),
            num_experts_per_tok=reader.get("num_experts_per_tok", 8),
            intermediate_size=reader.require("intermediate_size"),
            norm_topk_prob=bool(reader.get("norm_topk_prob", False)),
        ),
        norm=norm_from(reader, 1e-5),
    )


def _attention(reader: ConfigReader, max_positions: int = _MAX_POSITIONS, **family: Any) -> AttentionSpec:
    bias = bool(reader.get("attention_bias", False))
    norm = QkNorm(over_all_heads=True)
    return attention_from(reader, max_positions=max_positions, bias=bias, output_bias=bias, qk_norm=norm, **family)
