"""MiMoV2FlashForCausalLM: keys wider than values, windows with sinks and twice the KV heads, experts as in DeepSeek-V3.

The published sliding_window_size counts the tokens before a token's own. The layers that predict several tokens are not
served.
Source: Xiaomi LLM-Core 2026 (MiMo-V2-Flash); keys as in Hugging Face's MiMoV2FlashConfig, and as published.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import check_number, shown
from ferrum_jax.models.config_reader import ConfigReader, cache_groups
from ferrum_jax.models.deepseek import experts_from
from ferrum_jax.models.plain import attention_from, layers_where, norm_from, spec_from
from ferrum_jax.models.rope_reader import ropes_by_kind
from ferrum_jax.spec import AttentionSpec, ModelSpec

_MAX_POSITIONS = 131072
_TURNING = 0.334  # of each head
_THETAS = {"full_attention": ("rope_theta", 5e6), "sliding_attention": ("swa_rope_theta", 1e4)}
# A list of 0 and 1 in published configs, what it is called in the reference's, and what they stand for there.
_LISTS = {
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a MiMo-V2-Flash config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(_with_one_spelling(config))
    num_layers = reader.require("num_hidden_layers")
    reader.only(topk_method="noaux_tc", scoring_func="sigmoid", n_shared_experts=0)
    reader.get("attention_chunk_size", None)  # which the reference implementation does not read
    is_full = [layer == 0 or (layer + 1) % 6 == 0 for layer in range(num_layers)]
    kinds = reader.get("layer_types", ["full_attention" if full else "sliding_attention" for full in is_full])
    blocks = reader.get("mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1))
    if len(blocks) != num_layers or any(block not in ("dense", "sparse") for block in blocks):
        raise ValueError(
            f"mlp_layer_types is {shown(blocks)}; it must name 'dense' or 'sparse' for each of {num_layers} layers"
        )
    far, near = _attention(reader)
    windowed = layers_where(kind != "full_attention" for kind in kinds)
    experts = experts_from(
        reader,
        layers_where(block == "sparse" for block in blocks),
        num_experts=reader.get("n_routed_experts", 256),
        shared_intermediate_size=0,
    )
    return spec_from(
        reader,
        "MiMoV2FlashForCausalLM",
        max_positions=_MAX_POSITIONS,
        attention=far,
        other_attention=((windowed, near),) if windowed else (),
        experts=experts,
        norm=norm_from(reader, 1e-5),
        cache_groups=cache_groups(kinds, num_layers, reader.get("sliding_window", 129)),
    )


def _attention(reader: ConfigReader) -> tuple[AttentionSpec, AttentionSpec]:
    """That of layers that attend to all, and that of those with a window."""
    max_positions = reader.get("max_position_embeddings", _MAX_POSITIONS)
    rope, near_rope = ropes_by_kind(
        reader, max_positions, default_theta=5e6, local_theta=1e4, default_partial=_TURNING, local_partial=_TURNING
    )
    far = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 4),
        head_dim=reader.get("head_dim", 192),
        v_head_dim=reader.get("v_head_dim", 128),
        bias=bool(reader.get("attention_bias", False)),
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


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a MiMo-V2-Flash, and the Hugging Face tensor it comes from."""
    windowed = tuple(layer for layer in spec.attention_layers if spec.attention_of(layer).sinks)
    return (
        *decoder.weight_rules(spec),
        *decoder.per_layer("self_attn.attention_sink_bias", "attention.sinks", windowed),
    )


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, and the layers that predict several tokens at once, which are not served."""
    return (*decoder.harmless_tensors(spec), "model.mtp.*")
