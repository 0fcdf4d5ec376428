"""Phi3ForCausalLM (Phi-3 to Phi-4) and PhimoeForCausalLM (Phi-3.5-MoE): Llama's decoder, and long contexts by longrope.

longrope divides frequencies by one list of factors in contexts up to the original length and by another in longer
ones. The reference implementation changes lists when a sequence outgrows the original length, and computes all of
it anew. Keys in a cache cannot follow, so an engine takes one list for its life: the long one if max_model_len is
beyond the original length (`ModelSpec.fitted`).
Phi-3's projections are fused. Phi-3.5-MoE has LayerNorms, biases, the head's too, experts that are weighed among their
rivals, and one mscale for cos and sin.
Source: Abdin et al. 2024 (Phi-3); Ding et al. 2024 (LongRoPE); Liu et al. 2024 (GRIN);
keys as in Hugging Face's Phi3Config and PhimoeConfig, and as published.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.bounds import shown
from ferrum_jax.models.families.config_reader import ConfigReader, window_within
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import all_windowed, attention_from, experts_from, norm_from, spec_from
from ferrum_jax.models.spec import ModelSpec

LONGROPE = "longrope's factors follow `max_model_len`"
# Keys for which the reference implementation knows one value; every layer attends in full.
_ONLY = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY)
    return spec_from(reader, cache_groups=all_windowed(reader, window_within(reader)))


def with_ropes(
    config: Mapping[str, Any], respell: Callable[[dict[str, Any], int], Mapping[str, Any]]
) -> dict[str, Any]:
    """The config with its rope respelled, given the original length, which older ones say beside it."""
    found = dict(config)
    original = found.pop("original_max_position_embeddings", None) or 4096
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping):
            found[key] = respell(dict(found[key]), original)
    return found


def _rope(rope: dict[str, Any], original: int) -> Mapping[str, Any]:
    """Older ones call "longrope" "su" or "yarn"."""
    if rope.get("rope_type", rope.get("type", "default")) not in ("su", "yarn", "longrope"):
        return rope
    rope.pop("type", None)
    return {"original_max_position_embeddings": original} | rope | {"rope_type": "longrope"}


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every = tuple(range(spec.num_hidden_layers))
    own = spec.attention
    q = own.num_attention_heads * own.head_dim
    kv = own.num_key_value_heads * own.head_dim
    parts = tensors.in_turn({"q": q, "k": kv, "v": kv})
    return (
        *tensors.frame_rules(spec),
        *tensors.parts_per_layer("self_attn.qkv_proj.weight", "attention.{part}.weight", every, parts),
        *tensors.per_layer("self_attn.o_proj.weight", "attention.o.weight", every),
        *tensors.fused_mlp_rules(spec),
    )


def _moe(reader: ConfigReader) -> ModelSpec:
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


def _moe_rope(rope: dict[str, Any], original: int) -> Mapping[str, Any]:
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
    "Phi3ForCausalLM": Family(
        read=_spec,
        defaults={"max_position_embeddings": 4096, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
        respell=functools.partial(with_ropes, respell=_rope),
        weight_rules=_rules,
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        notes=LONGROPE,
    ),
    "PhimoeForCausalLM": Family(
        read=_moe,
        defaults={"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        respell=functools.partial(with_ropes, respell=_moe_rope),
        weight_rules=functools.partial(tensors.weight_rules, experts=tensors.MIXTRALS_EXPERTS),
        also=("PhiMoEForCausalLM",),
        models="Phi-3.5-MoE",
        notes=LONGROPE,
    ),
}
