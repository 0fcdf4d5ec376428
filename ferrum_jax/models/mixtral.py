"""MixtralForCausalLM: Mistral's decoder with eight experts in every layer, two of them for each token.

Source: Jiang et al. 2024 (Mixtral of Experts); keys as in Hugging Face's MixtralConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, cache_groups, stored_dtype, window_within
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, ExpertsSpec, MlpSpec, ModelSpec, NormSpec


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Mixtral config.json. Raises ValueError naming keys that are missing or not understood."""
    reader = ConfigReader(config)
    hidden_size = reader.require("hidden_size")
    num_heads = reader.require("num_attention_heads")
    num_layers = reader.require("num_hidden_layers")
    max_positions = reader.get("max_position_embeddings", 131072)
    width = reader.require("intermediate_size")
    spec = ModelSpec(
        architecture="MixtralForCausalLM",
        vocab_size=reader.require("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=max_positions,
        attention=AttentionSpec(
            num_attention_heads=num_heads,
            num_key_value_heads=reader.get("num_key_value_heads", num_heads),
            head_dim=reader.get("head_dim", hidden_size // num_heads),
            rope=rope_from(reader, max_positions, default_theta=1e6),
        ),
        mlp=MlpSpec(intermediate_size=width, hidden_act=reader.get("hidden_act", "silu")),
        experts=ExpertsSpec(
            layers=tuple(range(num_layers)),
            num_experts=reader.get("num_local_experts", reader.get("num_experts", 8)),
            num_experts_per_tok=reader.get("num_experts_per_tok", 2),
            intermediate_size=width,
            norm_topk_prob=True,
        ),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-5)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        cache_groups=cache_groups(["sliding_attention"] * num_layers, num_layers, window_within(reader, max_positions)),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Mixtral, and the Hugging Face tensor it comes from."""
    experts = decoder.expert_rules(spec, block="block_sparse_moe", names={"gate": "w1", "up": "w3", "down": "w2"})
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *experts)
