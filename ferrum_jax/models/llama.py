"""LlamaForCausalLM and MistralForCausalLM: Llama 1 to 3.3, Mistral, and the many models that share their architecture.

Mistral is Llama with a sliding window in all layers, or in none (0.2, 0.3, Nemo and later).
Source: Touvron et al. 2023; Dubey et al. 2024; Jiang et al. 2023; keys as in Hugging Face's LlamaConfig and
MistralConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype, window_within
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, MlpSpec, ModelSpec, NormSpec


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Llama config.json. Raises ValueError naming keys that are missing or not understood."""
    reader = ConfigReader(config)
    reader.only(rope_interleaved=False)  # SmolLM2's say so
    bias = bool(reader.get("attention_bias", False))
    max_positions = reader.get("max_position_embeddings", 2048)
    num_kv_heads = reader.get("num_key_value_heads", reader.require("num_attention_heads"))
    return _spec(
        reader,
        architecture="LlamaForCausalLM",
        max_position_embeddings=max_positions,
        attention=_attention(reader, max_positions, num_key_value_heads=num_kv_heads, bias=bias, output_bias=bias),
        mlp_bias=bool(reader.get("mlp_bias", False)),
    )


def mistral_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Mistral config.json. Raises ValueError naming keys that are missing or not understood.

    A window as long as the longest context is none.
    """
    reader = ConfigReader(config)
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", 131072)
    window = window_within(reader, max_positions, 4096)
    return _spec(
        reader,
        architecture="MistralForCausalLM",
        max_position_embeddings=max_positions,
        attention=_attention(reader, max_positions, num_key_value_heads=reader.get("num_key_value_heads", 8)),
        cache_groups=cache_groups(["sliding_attention"] * num_layers, num_layers, window),
    )


def _attention(reader: ConfigReader, max_positions: int, **family: Any) -> AttentionSpec:
    """What the families read alike of their attention."""
    num_heads = reader.require("num_attention_heads")
    return AttentionSpec(
        num_attention_heads=num_heads,
        head_dim=reader.get("head_dim", reader.require("hidden_size") // num_heads),
        rope=rope_from(reader, max_positions),
        **family,
    )


def _spec(reader: ConfigReader, *, mlp_bias: bool = False, **family: Any) -> ModelSpec:
    """What the families read alike."""
    spec = ModelSpec(
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=reader.require("num_hidden_layers"),
        mlp=MlpSpec(
            intermediate_size=reader.require("intermediate_size"),
            hidden_act=reader.get("hidden_act", "silu"),
            bias=mlp_bias,
        ),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
        **family,
    )
    reader.finish()
    return spec
