"""SmolLM3ForCausalLM: Llama's decoder in which every fourth layer knows no positions.

Source: Bakouch et al. 2025 (SmolLM3); Yang et al. 2025 (layers without rope); keys as in Hugging Face's SmolLM3Config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups, window_within
from ferrum_jax.models.plain import attention_from, layers_where, mlp_from, spec_from
from ferrum_jax.spec import ModelSpec

_MAX_POSITIONS = 32768


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a SmolLM3 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    num_layers = reader.require("num_hidden_layers")
    reader.get("max_window_layers", None)  # which the reference does not read
    period = reader.get("no_rope_layer_interval", 4)
    turns = reader.flags("no_rope_layers", [int((i + 1) % period != 0) for i in range(num_layers)])
    window = window_within(reader, reader.get("max_position_embeddings", _MAX_POSITIONS))
    window = window if reader.get("use_sliding_window", False) else None
    kinds = ["full_attention" if turn else "sliding_attention" for turn in turns]
    bias = bool(reader.get("attention_bias", False))
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 4),
        bias=bias,
        output_bias=bias,
    )
    still = layers_where(not turn for turn in turns)
    return spec_from(
        reader,
        "SmolLM3ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        other_attention=((still, dataclasses.replace(attention, rope=None)),),
        mlp=mlp_from(reader, bias=bool(reader.get("mlp_bias", False))),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
        cache_groups=cache_groups(reader.get("layer_types", kinds), num_layers, window),
    )
