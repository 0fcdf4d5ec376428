"""Qwen3NextForCausalLM: Qwen3-MoE's decoder in which most layers have a Gated DeltaNet instead of attention.

Attention has an output gate and turns a quarter of each head; layers with experts have one more that every token goes
to, behind a gate. Norms are 1 + w, but for the one inside the Gated DeltaNet.
Source: the model card of Qwen3-Next-80B-A3B (Qwen, 2025); keys as in Hugging Face's Qwen3NextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.bounds import shown
from ferrum_jax.models.config_reader import ConfigReader, stored_dtype
from ferrum_jax.models.qwen import experts_of
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import AttentionSpec, CacheGroup, GatedDeltaSpec, MlpSpec, ModelSpec, NormSpec, QkNorm

_KINDS = ("full_attention", "linear_attention")
# What Gated DeltaNets of all projections have, ours by the checkpoint's name.
RECURRENT = {
    "conv1d.weight": "conv",
    "A_log": "a_log",
    "dt_bias": "dt_bias",
    "norm.weight": "norm.weight",
    "out_proj.weight": "o.weight",
}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3-Next config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    max_positions = reader.get("max_position_embeddings", 32768)
    if reader.get("use_sliding_window", False):
        raise ValueError("use_sliding_window is true; this architecture has no layers with a window")
    spec = ModelSpec(
        architecture="Qwen3NextForCausalLM",
        vocab_size=reader.require("vocab_size"),
        hidden_size=reader.require("hidden_size"),
        num_hidden_layers=reader.require("num_hidden_layers"),
        max_position_embeddings=max_positions,
        attention=attention_from(reader, max_positions),
        mlp=MlpSpec(intermediate_size=reader.require("intermediate_size"), hidden_act=reader.get("hidden_act", "silu")),
        experts=experts_of(
            reader,
            num_experts=reader.get("num_experts", 512),
            num_experts_per_tok=reader.get("num_experts_per_tok", 10),
            intermediate_size=reader.get("moe_intermediate_size", 512),
            shared_intermediate_size=reader.get("shared_expert_intermediate_size", 512),
            norm_topk_prob=bool(reader.get("norm_topk_prob", True)),
        ),
        recurrence=recurrence_from(reader),
        norm=NormSpec(eps=reader.get("rms_norm_eps", 1e-6), zero_centred=True),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        cache_groups=hybrid_groups(reader),
        dtype=stored_dtype(reader),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    reader.finish()
    return spec


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


def attention_from(reader: ConfigReader, max_positions: int, num_kv_heads: int = 2) -> AttentionSpec:
    """Gated attention that turns a quarter of each head. num_kv_heads: where the config is silent."""
    bias = bool(reader.get("attention_bias", False))
    return AttentionSpec(
        num_attention_heads=reader.require("num_attention_heads"),
        num_key_value_heads=reader.get("num_key_value_heads", num_kv_heads),
        head_dim=reader.get("head_dim", 256),
        bias=bias,
        output_bias=bias,
        gate=True,
        qk_norm=QkNorm(),
        rope=rope_from(reader, max_positions, default_partial=0.25),
    )


def hybrid_groups(reader: ConfigReader) -> tuple[CacheGroup, ...]:
    """Attention where layer_types says so, else in the last of every full_attention_interval layers."""
    layers = range(reader.require("num_hidden_layers"))
    interval = reader.get("full_attention_interval", 4)
    kinds = reader.get("layer_types", [_KINDS[(i + 1) % interval != 0] for i in layers])
    if len(kinds) != len(layers) or any(kind not in _KINDS for kind in kinds):
        raise ValueError(
            f"layer_types is {shown(kinds)}; it must name one of {_KINDS} for each of {len(layers)} layers"
        )
    full, state = (tuple(i for i in layers if kinds[i] == kind) for kind in _KINDS)
    groups = (CacheGroup(kind="full", layers=full), CacheGroup(kind="state", layers=state))
    return tuple(group for group in groups if group.layers)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Qwen3-Next, and the Hugging Face tensor it comes from."""
    names = RECURRENT | {"in_proj_qkvz.weight": "qkvz.weight", "in_proj_ba.weight": "ba.weight"}
    return (*decoder.weight_rules(spec), *recurrent_rules(spec, names))


def recurrent_rules(spec: ModelSpec, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Tensors of Gated DeltaNets that are parameters as they are. names: ours by theirs."""
    return tuple(
        rule
        for source, target in names.items()
        for rule in decoder.per_layer(f"linear_attn.{source}", f"attention.{target}", spec.state_layers)
    )


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, and the layers that predict several tokens at once, which are not served."""
    return (*decoder.harmless_tensors(spec), "mtp.*")
