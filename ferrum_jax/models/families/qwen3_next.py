"""Qwen3NextForCausalLM: Qwen3-MoE's decoder in which most layers have a Gated DeltaNet instead of attention.

Attention has an output gate and turns a quarter of each head; layers with experts have one more that every token goes
to, behind a gate. Norms are 1 + w, but for the one inside the Gated DeltaNet.
Source: the model card of Qwen3-Next-80B-A3B (Qwen, 2025); keys as in Hugging Face's Qwen3NextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import IN_KERNELS, ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.mtp import MtpLayers, rules_above
from ferrum_jax.models.families.plain import attention_from, hybrid_groups, norm_from, spec_from
from ferrum_jax.models.families.qwen import experts_of
from ferrum_jax.models.spec import GatedDeltaSpec, ModelSpec, QkNorm

# What Gated DeltaNets of all projections have, ours by the checkpoint's name.
RECURRENT = {
    "conv1d.weight": "conv",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "out_proj.weight": "o.weight",
}
DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def _spec(reader: ConfigReader) -> ModelSpec:
    if reader.flag("use_sliding_window"):
        raise ValueError("use_sliding_window is true; this architecture has no layers with a window")
    shared = reader.get("shared_expert_intermediate_size", 512)
    experts = experts_of(reader, other_count="", shared_intermediate_size=shared)
    return hybrid_spec(reader, experts=experts, recurrence=recurrence_from(reader))


def hybrid_spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    """Gated attention in the last of every full_attention_interval layers, if layer_types does not say otherwise."""
    layers = range(reader.require("num_hidden_layers"))
    interval = reader.get("full_attention_interval", 4)
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias", gate=True, qk_norm=QkNorm()),
        norm=norm_from(reader, zero_centred=True),
        cache_groups=hybrid_groups(reader.get("layer_types", kinds), len(layers)),
        **family,
    )


def recurrence_from(reader: ConfigReader, **family: Any) -> GatedDeltaSpec:
    """The sizes of Gated DeltaNets."""
    return GatedDeltaSpec(
        num_key_heads=reader.get("linear_num_key_heads", 16),
        num_value_heads=reader.get("linear_num_value_heads", 32),
        key_head_dim=reader.get("linear_key_head_dim", 128),
        value_head_dim=reader.get("linear_value_head_dim", 128),
        conv_kernel_dim=reader.get("linear_conv_kernel_dim", 4),
        **family,
    )


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    names = RECURRENT | {"in_proj_qkvz.weight": "qkvz.weight", "in_proj_ba.weight": "ba.weight"}
    return rules_above((*tensors.weight_rules(spec), *recurrent_rules(spec, names)), spec)


def recurrent_rules(spec: ModelSpec, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Tensors of Gated DeltaNets that are parameters as they are. names: ours by theirs."""
    return tensors.named_rules("model.layers.{i}.linear_attn.", "layers.{i}.attention.", names, spec.state_layers)


FAMILIES = {
    "Qwen3NextForCausalLM": Family(
        read=_spec,
        defaults=DEFAULTS | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        weight_rules=_rules,
        harmless=with_unserved("mtp.*"),
        mtp=MtpLayers(default=1, most=1),  # whose published config counts none
        models="Qwen3-Next",
        notes=f"Gated DeltaNet layers, {IN_KERNELS}; {ONE_TOKEN}",
    )
}
