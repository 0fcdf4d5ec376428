"""NemotronForCausalLM: Nemotron-4 and Minitron. LayerNorms of 1 + weight, squared ReLU without a gate, partial rope.

Source: Parmar et al. 2024 (Nemotron-4 15B); keys as in Hugging Face's NemotronConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ModelSpec, NormSpec

_MAX_POSITIONS = 4096


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Nemotron config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(_with_one_spelling(config))
    bias = bool(reader.get("attention_bias", False))
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_partial=0.5)
    mlp_bias = bool(reader.get("mlp_bias", False))
    return spec_from(
        reader,
        "NemotronForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention_from(reader, max_positions=_MAX_POSITIONS, bias=bias, output_bias=bias, rope=rope),
        mlp=mlp_from(reader, hidden_act=reader.get("hidden_act", "relu2"), bias=mlp_bias, gated=False),
        norm=NormSpec(kind="layer", eps=reader.get("norm_eps", 1e-5), bias=True, zero_centred=True),
    )


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with `partial_rotary_factor` for what older ones call `rotary_percent` or `rope_percent`."""
    found = dict(config)
    for key in ("rotary_percent", "rope_percent"):
        if found.get(key) is not None:
            found.setdefault("partial_rotary_factor", found.pop(key))
    return found
