"""Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM: Llama's decoder with few differences.

Qwen2 has biases on q, k and v. Qwen3 has none by default, but norms on the heads of q and k. Qwen3-MoE
replaces the MLP of most layers by experts. Qwen2-MoE has both biases and experts, and one more expert for all tokens.
Source: Yang et al. 2024 (Qwen2), Yang et al. 2025 (Qwen3); keys as in Hugging Face's configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype, window_within
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, CacheGroup, ExpertsSpec, MlpSpec, ModelSpec, NormSpec, QkNorm

_MAX_POSITIONS = 32768  # where the config is silent


def qwen2_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen2 or Qwen2.5 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(use_mrope=False)  # Qwen2.5's base models have this key
    heads = reader.require("hidden_size") // reader.require("num_attention_heads")
    return _spec(
        reader,
        architecture="Qwen2ForCausalLM",
        attention=_attention(reader, head_dim=reader.get("head_dim", heads), bias=True),
    )


def qwen3_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    bias = bool(reader.get("attention_bias", False))
    return _spec(
        reader,
        architecture="Qwen3ForCausalLM",
        attention=_attention(
            reader, head_dim=reader.get("head_dim", 128), bias=bias, output_bias=bias, qk_norm=QkNorm()
        ),
    )


def qwen3_moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3-MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)  # Qwen3-Coder has these keys
    heads = reader.require("hidden_size") // reader.require("num_attention_heads")
    bias = bool(reader.get("attention_bias", False))
    return _spec(
        reader,
        architecture="Qwen3MoeForCausalLM",
        attention=_attention(
            reader, head_dim=reader.get("head_dim", heads), bias=bias, output_bias=bias, qk_norm=QkNorm()
        ),
        experts=experts_of(
            reader,
            num_experts=reader.get("num_experts", reader.get("num_local_experts", 128)),
            num_experts_per_tok=reader.get("num_experts_per_tok", 8),
            intermediate_size=reader.get("moe_intermediate_size", 768),
            norm_topk_prob=bool(reader.get("norm_topk_prob", False)),
        ),
    )


def qwen2_moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen1.5-MoE or Qwen2-MoE config.json. Raises ValueError naming what is not understood."""
    reader = ConfigReader(config)
    heads = reader.require("hidden_size") // reader.require("num_attention_heads")
    return _spec(
        reader,
        architecture="Qwen2MoeForCausalLM",
        attention=_attention(reader, head_dim=reader.get("head_dim", heads), bias=bool(reader.get("qkv_bias", True))),
        experts=experts_of(
            reader,
            num_experts=reader.get("num_experts", reader.get("num_local_experts", 60)),
            num_experts_per_tok=reader.get("num_experts_per_tok", 4),
            intermediate_size=reader.get("moe_intermediate_size", 1408),
            shared_intermediate_size=reader.get("shared_expert_intermediate_size", 5632),
            norm_topk_prob=bool(reader.get("norm_topk_prob", False)),
        ),
    )


def experts_of(reader: ConfigReader, **sizes: Any) -> ExpertsSpec | None:
    """The experts of the layers that have them, None where no layer does.

    Layer i has experts when (i + 1) is a multiple of decoder_sparse_step and i is not in mlp_only_layers.
    """
    step = reader.get("decoder_sparse_step", 1)
    dense = reader.get("mlp_only_layers", [])
    if any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {shown(dense)}; it must be a list of layers")
    dense = set(dense)
    layers = tuple(i for i in range(reader.require("num_hidden_layers")) if (i + 1) % step == 0 and i not in dense)
    return ExpertsSpec(layers=layers, **sizes) if layers else None


def _attention(reader: ConfigReader, **family: Any) -> AttentionSpec:
    """The attention fields that all three families read the same way."""
    num_heads = reader.require("num_attention_heads")
    return AttentionSpec(
        num_attention_heads=num_heads,
        num_key_value_heads=reader.get("num_key_value_heads", num_heads),
        rope=rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS)),
        **family,
    )


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    """The fields that all three families read the same way."""
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    groups = _cache_groups(reader, num_layers, max_positions, family["architecture"])
    spec = ModelSpec(
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        mlp=MlpSpec(intermediate_size=reader.require("intermediate_size"), hidden_act=reader.get("hidden_act", "silu")),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
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
    """If windows are enabled, layer_types says which layers have one; without it, those from max_window_layers on.

    A window as long as the longest context counts as none. Qwen3-MoE takes 0 in place of max_window_layers.
    """
    enabled = bool(reader.get("use_sliding_window", False))
    window = window_within(reader, max_positions, 4096)
    first = reader.get("max_window_layers", 28) if architecture != "Qwen3MoeForCausalLM" else 0
    reader.get("max_window_layers", None)
    default = ["sliding_attention" if enabled and i >= first else "full_attention" for i in range(num_layers)]
    if architecture == "Qwen2MoeForCausalLM":  # every second layer before max_window_layers
        default = [
            "sliding_attention" if enabled and i < first and i % 2 == 0 else "full_attention" for i in range(num_layers)
        ]
    kinds = reader.get("layer_types", default)
    return cache_groups(kinds, num_layers, window if enabled else None)
