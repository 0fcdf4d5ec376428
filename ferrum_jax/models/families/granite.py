"""GraniteForCausalLM, GraniteMoeForCausalLM and GraniteMoeHybridForCausalLM (Granite 4): Llama's with four multipliers.

Embeddings, the logits of attention, what each half of a layer adds, and the logits of tokens are scaled. Most layers of
Granite 4 have Mamba2 instead of attention, and an MLP, or experts beside one of all tokens; most sizes have no
positions.
Source: Granite Team 2024 (Granite 3.0), 2025 (Granite 4.0); keys as in Hugging Face's GraniteConfig, GraniteMoeConfig
and GraniteMoeHybridConfig.
"""

from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import IN_KERNELS, Family
from ferrum_jax.models.families.mamba2_reader import mamba2_from, mamba2_groups, mamba2_rules
from ferrum_jax.models.families.plain import attention_from, experts_from, mlp_from, spec_from
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    return granite_spec(reader, mlp=mlp_from(reader, biases="mlp_bias"))


def _moe(reader: ConfigReader) -> ModelSpec:
    return granite_spec(reader, experts=experts_from(reader, reader.get("num_local_experts", 8), norm_topk_prob=True))


def granite_spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    """The spec with the keys that all Granite families share. rope: by default the config's."""
    rope = {"rope": family.pop("rope")} if "rope" in family else {}
    scale = reader.get("attention_multiplier", 1.0) ** -2
    return spec_from(
        reader,
        attention=attention_from(reader, biases="attention_bias", query_pre_attn_scalar=scale, **rope),
        embedding_scale=float(reader.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(reader.get("residual_multiplier", 1.0)),
        logit_scale=1 / reader.get("logits_scaling", 1.0),
        **family,
    )


def expert_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Routers and experts, none of a model without them."""
    moe = "block_sparse_moe"
    return tensors.stacked_expert_rules(
        spec.experts, f"{moe}.input_linear.weight", f"{moe}.output_linear.weight", router=f"{moe}.router.layer.weight"
    )


def _moe_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (*tensors.frame_rules(spec), *tensors.attention_rules(spec), *expert_rules(spec))


_DEFAULTS = {"max_position_embeddings": 2048}


def _hybrid(reader: ConfigReader) -> ModelSpec:
    reader.only(normalization_function="rmsnorm")
    reader.leave("init_method")
    layers, shared = reader.require("num_hidden_layers"), reader.get("shared_intermediate_size", 1024)
    has_rope = reader.get("position_embedding_type", "nope")
    if has_rope not in ("nope", "rope"):
        raise ValueError(f"position_embedding_type is {has_rope!r}; it must be 'rope' or 'nope'")
    rope = rope_from(reader)
    kinds = reader.get("layer_types", reader.get("layers_block_type", ["linear_attention"] * layers))
    groups = mamba2_groups(kinds, layers)
    mamba = mamba2_from(reader, reader.get("mamba_expand", 2) * reader.require("hidden_size"))
    num_experts, per_token = reader.get("num_local_experts", 8), reader.get("num_experts_per_tok", 2)
    width = reader.get("intermediate_size", 11008)
    experts = {"norm_topk_prob": True, "shared_intermediate_size": shared, "shared_gate": False}
    return granite_spec(
        reader,
        rope=rope if has_rope == "rope" else None,
        mlp=mlp_from(reader, intermediate_size=width if num_experts else shared),
        experts=experts_from(reader, num_experts, num_experts_per_tok=per_token, **experts) if num_experts else None,
        cache_groups=groups,
        recurrence=mamba if groups[-1].kind == "state" else None,
    )


def _hybrid_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every, own = tuple(range(spec.num_hidden_layers)), spec.experts
    width, target = (spec.mlp.intermediate_size, "mlp") if own is None else (own.shared_intermediate_size, "mlp.shared")
    return (
        *tensors.frame_rules(spec),
        *tensors.attention_rules(spec),
        *mamba2_rules(spec, "mamba"),
        *expert_rules(spec),
        *tensors.parts_per_layer(
            "shared_mlp.input_linear.weight", f"{target}.{{part}}.weight", every, tensors.halves(width)
        ),
        *tensors.per_layer("shared_mlp.output_linear.weight", f"{target}.down.weight", every),
    )


FAMILIES = {
    "GraniteForCausalLM": Family(read=_spec, defaults=_DEFAULTS, models="Granite 3"),
    "GraniteMoeForCausalLM": Family(read=_moe, defaults=_DEFAULTS, weight_rules=_moe_rules, models="Granite 3"),
    "GraniteMoeHybridForCausalLM": Family(
        read=_hybrid,
        defaults={"max_position_embeddings": 2048, "intermediate_size": 11008},
        weight_rules=_hybrid_rules,
        models="Granite 4.0, also its H sizes",
        notes=f"Mamba2 layers, {IN_KERNELS}",
    ),
}
