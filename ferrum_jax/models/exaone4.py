"""Exaone4ForCausalLM: Llama's decoder with norms after each half and on the heads of q and k.

Layers with a window have rope; those between them attend to all and know no positions.
Source: LG AI Research 2025 (EXAONE 4.0); keys as in Hugging Face's Exaone4Config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.config_reader import ConfigReader, cache_groups
from ferrum_jax.models.plain import attention_from, every_nth_full, layers_where, norm_from, spec_from
from ferrum_jax.spec import ModelSpec, QkNorm

_MAX_POSITIONS = 2048


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an EXAONE 4 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(_with_a_number(config))
    window = reader.nullable("sliding_window", 4096)
    pattern = reader.get("sliding_window_pattern", 4)
    kinds = every_nth_full(reader, pattern if window is not None else 1)
    heads = reader.get("num_key_value_heads", 32)
    attention = attention_from(reader, max_positions=_MAX_POSITIONS, num_key_value_heads=heads, qk_norm=QkNorm())
    still = layers_where(window is not None and kind == "full_attention" for kind in kinds)
    return spec_from(
        reader,
        "Exaone4ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        other_attention=((still, dataclasses.replace(attention, rope=None)),),
        norm=norm_from(reader, 1e-5, before=False, after=True),
        cache_groups=cache_groups(kinds, reader.require("num_hidden_layers"), window),
    )


def _with_a_number(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the length of a pattern that is spelled "LLLG", local layers and then a global one."""
    pattern = config.get("sliding_window_pattern")
    spelled = isinstance(pattern, str) and pattern == "L" * (len(pattern) - 1) + "G"
    return dict(config) | ({"sliding_window_pattern": len(pattern)} if spelled and pattern else {})
