"""SeedOssForCausalLM: Llama's decoder with biases on q, k and v.

Source: ByteDance Seed Team 2025 (Seed-OSS); keys as in Hugging Face's SeedOssConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, mlp_from, spec_from
from ferrum_jax.spec import ModelSpec

_MAX_POSITIONS = 524288


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Seed-OSS config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.get("residual_dropout", None)  # of training
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        head_dim=reader.get("head_dim", 128),
        bias=bool(reader.get("attention_bias", True)),
        output_bias=bool(reader.get("attention_out_bias", False)),
    )
    mlp = mlp_from(reader, bias=bool(reader.get("mlp_bias", False)))
    return spec_from(reader, "SeedOssForCausalLM", max_positions=_MAX_POSITIONS, attention=attention, mlp=mlp)
