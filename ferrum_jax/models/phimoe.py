"""PhimoeForCausalLM: Phi-3.5-MoE. LayerNorms, biases, the head's too, and experts that are weighed among their rivals.

Long contexts are by longrope as in phi.py; cos and sin are multiplied by an mscale, of which one is served.
Source: Abdin et al. 2024 (Phi-3); Liu et al. 2024 (GRIN); keys as in Hugging Face's PhimoeConfig, and as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader, window_within
from ferrum_jax.models.plain import all_windowed, attention_from, norm_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec

_MAX_POSITIONS = 131072
_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_OF_TRAINING = ("input_jitter_noise", "hidden_dropout")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Phi-3.5-MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(_with_one_spelling(config))
    reader.only(num_experts_per_tok=2)
    for key in _OF_TRAINING:
        reader.get(key, None)
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    bias = bool(reader.get("attention_bias", False))
    return spec_from(
        reader,
        "PhimoeForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=attention_from(
            reader,
            max_positions=_MAX_POSITIONS,
            bias=bias,
            output_bias=bias,
            rope=rope_from(reader, max_positions, default_theta=1e6),
        ),
        experts=ExpertsSpec(
            layers=tuple(range(reader.require("num_hidden_layers"))),
            num_experts=reader.get("num_local_experts", 16),
            num_experts_per_tok=2,
            intermediate_size=reader.require("intermediate_size"),
            rivals_within=2 * reader.get("router_jitter_noise", 0.01),
        ),
        norm=norm_from(reader, 1e-5, kind="layer", bias=True),
        head_bias=bool(reader.get("lm_head_bias", False)),
        cache_groups=all_windowed(reader, window_within(reader, max_positions)),
    )


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the original length and the factor of cos and sin among longrope's own keys."""
    found = dict(config)
    original = found.pop("original_max_position_embeddings", None) or 4096
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(found.get(key), Mapping):
            continue
        rope = dict(found[key])
        kind = rope.pop("type", "default")
        if rope.setdefault("rope_type", kind) == "longrope":
            short, long = rope.pop("short_mscale", None), rope.pop("long_mscale", None)
            if short is None or short != long:
                raise ValueError(
                    f"short_mscale is {shown(short)} and long_mscale {shown(long)} of the rope; they must be one "
                    "number, for keys in a cache cannot follow a change from one to the other"
                )
            rope = {"original_max_position_embeddings": original} | rope | {"attention_factor": short}
        found[key] = rope
    return found


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Phi-3.5-MoE, and the Hugging Face tensor it comes from."""
    experts = decoder.expert_rules(spec, block="block_sparse_moe", names=_EXPERTS)
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *experts)
