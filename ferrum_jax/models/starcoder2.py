"""Starcoder2ForCausalLM: LayerNorms, MLPs without a gate, and biases everywhere.

Source: Lozhkov et al. 2024 (StarCoder 2); keys as in Hugging Face's Starcoder2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, window_within
from ferrum_jax.models.plain import all_windowed, attention_from, mlp_from, spec_from
from ferrum_jax.spec import ModelSpec, NormSpec

_MAX_POSITIONS = 4096


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a StarCoder 2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(mlp_type="default", norm_type="layer_norm")
    for key in ("residual_dropout", "embedding_dropout", "max_length"):  # of training
        reader.get(key, None)
    bias = bool(reader.get("use_bias", True))
    window = window_within(reader, reader.get("max_position_embeddings", _MAX_POSITIONS))
    heads = reader.get("num_key_value_heads", 2)
    return spec_from(
        reader,
        "Starcoder2ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention_from(
            reader, max_positions=_MAX_POSITIONS, num_key_value_heads=heads, bias=bias, output_bias=bias
        ),
        mlp=mlp_from(reader, hidden_act=reader.get("hidden_act", "gelu_pytorch_tanh"), bias=bias, gated=False),
        norm=NormSpec(kind="layer", eps=reader.get("norm_epsilon", 1e-5), bias=True),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
        cache_groups=all_windowed(reader, window),
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a StarCoder 2, and the Hugging Face tensor it comes from."""
    mlp = decoder.mlp_rules(spec, up="c_fc", down="c_proj")
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *mlp)
