"""GraniteForCausalLM and GraniteMoeForCausalLM: Llama's decoder, and one of experts, with four multipliers.

Embeddings, the logits of attention, what each half of a layer adds, and the logits of tokens are scaled.
Source: Granite Team 2024 (Granite 3.0); keys as in Hugging Face's GraniteConfig and GraniteMoeConfig.
"""

from __future__ import annotations

from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.plain import attention_from, experts_from, mlp_from, spec_from
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    return granite_spec(reader, mlp=mlp_from(reader, biases="mlp_bias"))


def _moe(reader: ConfigReader) -> ModelSpec:
    return granite_spec(reader, experts=experts_from(reader, reader.get("num_local_experts", 8), norm_topk_prob=True))


def granite_spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    """What the families read alike. rope: the config's where it is not given."""
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
FAMILIES = {
    "GraniteForCausalLM": Family(read=_spec, defaults=_DEFAULTS, models="Granite 3"),
    "GraniteMoeForCausalLM": Family(read=_moe, defaults=_DEFAULTS, weight_rules=_moe_rules, models="Granite 3"),
}
