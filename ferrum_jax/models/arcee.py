"""ArceeForCausalLM: Llama's decoder whose MLPs have no gate and square what ReLU leaves.

Source: Arcee AI 2025 (AFM-4.5B); So et al. 2021 (Primer: squared ReLU); keys as in Hugging Face's ArceeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, mlp_from, norm_from, spec_from
from ferrum_jax.spec import ModelSpec

_MAX_POSITIONS = 4096


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an Arcee config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    bias = bool(reader.get("attention_bias", False))
    mlp_bias = bool(reader.get("mlp_bias", False))
    return spec_from(
        reader,
        "ArceeForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention_from(reader, max_positions=_MAX_POSITIONS, bias=bias, output_bias=bias),
        mlp=mlp_from(reader, hidden_act=reader.get("hidden_act", "relu2"), bias=mlp_bias, gated=False),
        norm=norm_from(reader, 1e-5),
    )
