"""LlamaForCausalLM: Llama 1 to 3.3 and the many models that share its architecture.

Source: Touvron et al. 2023; Dubey et al. 2024; keys as in Hugging Face's LlamaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, rope_from, stored_dtype
from ferrum_jax.spec import ModelSpec


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Llama config.json. Raises ValueError naming keys that are missing or not understood."""
    reader = ConfigReader(config)
    hidden_size = reader.require("hidden_size")
    num_heads = reader.require("num_attention_heads")
    max_positions = reader.get("max_position_embeddings", 2048)
    bias = bool(reader.get("attention_bias", False))
    spec = ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=reader.require("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=reader.require("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=reader.get("num_key_value_heads", num_heads),
        head_dim=reader.get("head_dim", hidden_size // num_heads),
        intermediate_size=reader.require("intermediate_size"),
        max_position_embeddings=max_positions,
        hidden_act=reader.get("hidden_act", "silu"),
        rms_norm_eps=reader.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        attention_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bool(reader.get("mlp_bias", False)),
        rope=rope_from(reader, max_positions),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec
