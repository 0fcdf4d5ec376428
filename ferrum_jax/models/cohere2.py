"""Cohere2ForCausalLM: Command R7B and Command A. Attention and MLP side by side behind one LayerNorm without a bias.

Layers with a window turn neighbours together; those between them attend to all and know no positions.
Source: Cohere 2024, 2025 (Command R7B, Command A); keys as in Hugging Face's Cohere2Config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader, cache_groups
from ferrum_jax.models.plain import attention_from, every_nth_full, layers_where, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ModelSpec, NormSpec

_MAX_POSITIONS = 8192
# Keys of published configs that the reference does not read: of one value, and repeated by others.
_ONLY = {"use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0}
_ONLY |= {"position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"}
_UNREAD = ("layer_switch", "use_embedding_sharing", "use_parallel_embedding")
_NORMS = {"attention_norm": "input_layernorm"}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Command R7B or Command A config.json. Raises ValueError naming what is not understood."""
    reader = ConfigReader(config)
    reader.only(**_ONLY)
    for key in _UNREAD:
        reader.get(key, None)
    bias = bool(reader.get("attention_bias", False))
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS))
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        bias=bias,
        output_bias=bias,
        rope=dataclasses.replace(rope, interleaved=True),
    )
    kinds = every_nth_full(reader, reader.get("sliding_window_pattern", 4))
    still = layers_where(kind == "full_attention" for kind in kinds)
    return spec_from(
        reader,
        "Cohere2ForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention,
        other_attention=((still, dataclasses.replace(attention, rope=None)),),
        norm=NormSpec(kind="layer", eps=reader.get("layer_norm_eps", 1e-5)),
        parallel=True,
        logit_scale=float(reader.get("logit_scale", 0.0625)),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
        cache_groups=cache_groups(kinds, reader.require("num_hidden_layers"), reader.nullable("sliding_window", 4096)),
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Cohere 2, and the Hugging Face tensor it comes from."""
    return (*decoder.frame_rules(spec, _NORMS), *decoder.attention_rules(spec), *decoder.mlp_rules(spec))
