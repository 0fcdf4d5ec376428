"""Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM: Llama's decoder with three differences.

Qwen2 has biases on q, k and v. Qwen3 has none by default, but norms on the heads of q and k. Qwen3-MoE
replaces the MLP of most layers by experts.
Source: Yang et al. 2024 (Qwen2), Yang et al. 2025 (Qwen3); keys as in Hugging Face's configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups, rope_from, stored_dtype, window_within
from ferrum_jax.spec import CacheGroup, ModelSpec


def qwen2_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen2 or Qwen2.5 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(use_mrope=False)  # Qwen2.5's base models say so
    heads = reader.require("hidden_size") // reader.require("num_attention_heads")
    return _spec(
        reader,
        architecture="Qwen2ForCausalLM",
        head_dim=reader.get("head_dim", heads),
        attention_bias=True,
    )


def qwen3_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    bias = bool(reader.get("attention_bias", False))
    return _spec(
        reader,
        architecture="Qwen3ForCausalLM",
        head_dim=reader.get("head_dim", 128),
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
    )


def qwen3_moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3-MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)  # Qwen3-Coder's say so
    heads = reader.require("hidden_size") // reader.require("num_attention_heads")
    bias = bool(reader.get("attention_bias", False))
    return _spec(
        reader,
        architecture="Qwen3MoeForCausalLM",
        head_dim=reader.get("head_dim", heads),
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        moe_layers=sparse_layers(reader),
        num_experts=reader.get("num_experts", reader.get("num_local_experts", 128)),
        num_experts_per_tok=reader.get("num_experts_per_tok", 8),
        moe_intermediate_size=reader.get("moe_intermediate_size", 768),
        norm_topk_prob=bool(reader.get("norm_topk_prob", False)),
    )


def sparse_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Layer i has experts when (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers."""
    step = reader.get("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    return tuple(i for i in range(reader.require("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense)


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    """What the three families read alike."""
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", 32768)
    groups = _cache_groups(reader, num_layers, max_positions, family["architecture"])
    spec = ModelSpec(
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=reader.require("num_attention_heads"),
        num_key_value_heads=reader.get("num_key_value_heads", reader.require("num_attention_heads")),
        intermediate_size=reader.require("intermediate_size"),
        max_position_embeddings=max_positions,
        hidden_act=reader.get("hidden_act", "silu"),
        rms_norm_eps=reader.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        rope=rope_from(reader, max_positions),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
        cache_groups=groups,
        **family,
    )
    reader.finish()
    return spec


def _cache_groups(
    reader: ConfigReader, num_layers: int, max_positions: int, architecture: str
) -> tuple[CacheGroup, ...]:
    """Windows, where they are enabled, are those of the layers that layer_types says, or from max_window_layers on.

    A window as long as the longest context is none. Qwen3-MoE has one in all layers, or in those that layer_types says.
    """
    enabled = bool(reader.get("use_sliding_window", False))
    window = window_within(reader, max_positions, 4096)
    first = reader.get("max_window_layers", 28) if architecture != "Qwen3MoeForCausalLM" else 0
    reader.get("max_window_layers", None)
    default = ["sliding_attention" if enabled and i >= first else "full_attention" for i in range(num_layers)]
    kinds = reader.get("layer_types", default)
    return cache_groups(kinds, num_layers, window if enabled else None)
