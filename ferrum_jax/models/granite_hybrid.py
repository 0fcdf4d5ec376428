"""GraniteMoeHybridForCausalLM: Granite 4, in which most layers have Mamba2 instead of attention.

Layers have an MLP, or experts beside one of all tokens. Most sizes have no positions.
Source: Granite Team 2025 (Granite 4.0); keys as in Hugging Face's GraniteMoeHybridConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.granite import granite_spec, stacked_expert_rules
from ferrum_jax.models.mamba2_reader import hybrid_groups, mamba2_from, mamba2_rules
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ExpertsSpec, MlpSpec, ModelSpec

_MAX_POSITIONS = 2048


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Granite 4 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(normalization_function="rmsnorm")
    reader.get("init_method", None)
    layers, shared = reader.require("num_hidden_layers"), reader.get("shared_intermediate_size", 1024)
    has_rope = reader.get("position_embedding_type", "nope")
    if has_rope not in ("nope", "rope"):
        raise ValueError(f"position_embedding_type is {has_rope!r}; it must be 'rope' or 'nope'")
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS))
    kinds = reader.get("layer_types", reader.get("layers_block_type", ["linear_attention"] * layers))
    groups = hybrid_groups(kinds, layers)
    inner = reader.get("mamba_expand", 2) * reader.require("hidden_size")
    mamba = mamba2_from(reader, inner)
    num_experts, per_token = reader.get("num_local_experts", 8), reader.get("num_experts_per_tok", 2)
    width = reader.get("intermediate_size", 11008)
    return granite_spec(
        reader,
        "GraniteMoeHybridForCausalLM",
        rope=rope if has_rope == "rope" else None,
        mlp=MlpSpec(intermediate_size=width if num_experts else shared, hidden_act=reader.get("hidden_act", "silu")),
        experts=ExpertsSpec(
            layers=tuple(range(layers)),
            num_experts=num_experts,
            num_experts_per_tok=per_token,
            intermediate_size=width,
            norm_topk_prob=True,
            shared_intermediate_size=shared,
            shared_gate=False,
        )
        if num_experts
        else None,
        cache_groups=groups,
        recurrence=mamba if groups[-1].kind == "state" else None,
    )


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Granite 4, and the Hugging Face tensor it comes from: gate stands by up."""
    every, own = tuple(range(spec.num_hidden_layers)), spec.experts
    width, target = (spec.mlp.intermediate_size, "mlp") if own is None else (own.shared_intermediate_size, "mlp.shared")
    gate_up = "shared_mlp.input_linear.weight"
    return (
        *decoder.frame_rules(spec),
        *decoder.attention_rules(spec),
        *mamba2_rules(spec, "mamba"),
        *stacked_expert_rules(spec),
        *decoder.per_layer(gate_up, f"{target}.gate.weight", every, TensorSlice(stop=width)),
        *decoder.per_layer(gate_up, f"{target}.up.weight", every, TensorSlice(start=width)),
        *decoder.per_layer("shared_mlp.output_linear.weight", f"{target}.down.weight", every),
    )
