"""MiMoV2FlashForCausalLM: keys wider than values, windows with sinks and twice the KV heads, experts as in DeepSeek-V3.

The published sliding_window_size counts the tokens before a token's own. The layers that predict several tokens are not
served.
Source: Xiaomi LLM-Core 2026 (MiMo-V2-Flash); keys as in Hugging Face's MiMoV2FlashConfig, and as published.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.bounds import check_number
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.plain import attention_from, layers_where, sparse_layers, spec_from, windows_of
from ferrum_jax.models.families.rope_reader import ropes_by_kind
from ferrum_jax.models.spec import AttentionSpec, ModelSpec

_TURNING = 0.334  # of each head
_THETAS = {"full_attention": ("rope_theta", 5e6), "sliding_attention": ("swa_rope_theta", 1e4)}
# A list of 0 and 1 in published configs, what it is called in the reference's, and what they stand for there.
_LISTS = {
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(topk_method="noaux_tc", scoring_func="sigmoid", n_shared_experts=0)
    reader.leave("attention_chunk_size")  # which the reference implementation does not read
    is_full = [layer == 0 or (layer + 1) % 6 == 0 for layer in range(reader.require("num_hidden_layers"))]
    kinds = reader.get("layer_types", ["full_attention" if full else "sliding_attention" for full in is_full])
    layers = sparse_layers(reader, 1)
    far, near = _attention(reader)
    windowed = layers_where(kind != "full_attention" for kind in kinds)
    return spec_from(
        reader,
        attention=far,
        other_attention=((windowed, near),) if windowed else (),
        experts=deepseek.experts_from(reader, layers, shared_intermediate_size=0),
        cache_groups=windows_of(reader, kinds, reader.get("sliding_window", 129)),
    )


def _attention(reader: ConfigReader) -> tuple[AttentionSpec, AttentionSpec]:
    """Attention of layers that attend to all, and of layers with a window."""
    rope, near_rope = ropes_by_kind(reader, local_theta=1e4, default_partial=_TURNING, local_partial=_TURNING)
    far = attention_from(
        reader,
        v_head_dim=reader.get("v_head_dim", 128),
        bias=reader.flag("attention_bias"),
        output_multiplier=float(reader.nullable("attention_value_scale", 0.707) or 1.0),
        rope=rope,
    )
    near = dataclasses.replace(far, num_key_value_heads=2 * far.num_key_value_heads, sinks=True, rope=near_rope)
    reader.only(
        swa_num_attention_heads=near.num_attention_heads,
        swa_num_key_value_heads=near.num_key_value_heads,
        swa_head_dim=near.head_dim,
        swa_v_head_dim=near.value_dim,
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
    )
    return far, near


def _with_one_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the reference implementation writes it: kinds of layers by name, ropes by kind.

    A null counts as absent, but for attention_value_scale, whose null is one.
    """
    found: dict[str, Any] = {
        key: value for key, value in config.items() if value is not None or key == "attention_value_scale"
    }
    for theirs, (ours, names) in _LISTS.items():
        flags = found.get(theirs)
        if isinstance(flags, list | tuple) and all(type(flag) is int and flag in (0, 1) for flag in flags):
            found[ours] = [names[flag] for flag in found.pop(theirs)]
    if "layernorm_epsilon" in found:
        found["rms_norm_eps"] = found.pop("layernorm_epsilon")
    if "sliding_window_size" in found:
        check_number("sliding_window_size", found["sliding_window_size"])
        found["sliding_window"] = found.pop("sliding_window_size") + 1
    thetas = {kind: found.pop(key, default) for kind, (key, default) in _THETAS.items()}
    partial = found.pop("partial_rotary_factor", _TURNING)
    own = {kind: {"rope_theta": theta, "partial_rotary_factor": partial} for kind, theta in thetas.items()}
    return {"rope_parameters": own} | found


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    windowed = tuple(layer for layer in spec.attention_layers if spec.attention_of(layer).sinks)
    sinks = tensors.per_layer("self_attn.attention_sink_bias", "attention.sinks", windowed)
    return (*tensors.weight_rules(spec), *sinks)


FAMILIES = {
    "MiMoV2FlashForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "rope_theta": 5e6,
            "rms_norm_eps": 1e-5,
        },
        respell=_with_one_spelling,
        weight_rules=_rules,
        harmless=with_unserved("model.mtp.*"),
        models="MiMo-V2-Flash",
        notes=f"keys wider than values; {ONE_TOKEN}",
    )
}
