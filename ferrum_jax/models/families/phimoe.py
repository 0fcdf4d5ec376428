"""PhimoeForCausalLM: Phi-3.5-MoE. LayerNorms, biases, the head's too, and experts that are weighed among their rivals.

Long contexts are by longrope as in phi.py; cos and sin are multiplied by one mscale.
Source: Abdin et al. 2024 (Phi-3); Liu et al. 2024 (GRIN); keys as in Hugging Face's PhimoeConfig, and as published.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.phi import LONGROPE, with_ropes
from ferrum_jax.models.families.plain import all_windowed, attention_from, experts_from, norm_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(num_experts_per_tok=2)
    reader.leave("input_jitter_noise", "hidden_dropout")  # of training
    within = 2 * reader.get("router_jitter_noise", 0.01)
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias"),
        experts=experts_from(reader, reader.get("num_local_experts", 16), rivals_within=within),
        norm=norm_from(reader, kind="layer", bias=True),
        head_bias=reader.flag("lm_head_bias"),
        cache_groups=all_windowed(reader, window_within(reader)),
    )


def _rope(rope: dict[str, Any], original: int) -> Mapping[str, Any]:
    """The original length and the factor of cos and sin are longrope's own keys."""
    kind = rope.pop("type", "default")
    if rope.setdefault("rope_type", kind) != "longrope":
        return rope
    short, long = rope.pop("short_mscale", None), rope.pop("long_mscale", None)
    if short is None or short != long:
        raise ValueError(
            f"short_mscale is {shown(short)} and long_mscale {shown(long)} of the rope; they must be one "
            "number, for keys in a cache cannot follow a change from one to the other"
        )
    return {"original_max_position_embeddings": original} | rope | {"attention_factor": short}


FAMILIES = {
    "PhimoeForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        respell=functools.partial(with_ropes, respell=_rope),
        weight_rules=functools.partial(tensors.weight_rules, experts=tensors.MIXTRALS_EXPERTS),
        also=("PhiMoEForCausalLM",),
        models="Phi-3.5-MoE",
        notes=LONGROPE,
    )
}
