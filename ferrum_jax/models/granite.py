"""GraniteForCausalLM and GraniteMoeForCausalLM: Llama's decoder, and one of experts, with four multipliers.

Embeddings, the logits of attention, what each half of a layer adds, and the logits of tokens are scaled.
Source: Granite Team 2024 (Granite 3.0); keys as in Hugging Face's GraniteConfig and GraniteMoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, mlp_from, spec_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec

_MAX_POSITIONS = 2048
_OF_CONFIG = object()


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Granite config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    return granite_spec(reader, "GraniteForCausalLM", mlp=mlp_from(reader, bias=bool(reader.get("mlp_bias", False))))


def moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Granite MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    experts = ExpertsSpec(
        layers=tuple(range(reader.require("num_hidden_layers"))),
        num_experts=reader.get("num_local_experts", 8),
        num_experts_per_tok=reader.get("num_experts_per_tok", 2),
        intermediate_size=reader.require("intermediate_size"),
        norm_topk_prob=True,
    )
    return granite_spec(reader, "GraniteMoeForCausalLM", experts=experts)


def granite_spec(reader: ConfigReader, architecture: str, *, rope: Any = _OF_CONFIG, **family: Any) -> ModelSpec:
    """What the families read alike. rope: the config's where it is not given."""
    bias = bool(reader.get("attention_bias", False))
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        bias=bias,
        output_bias=bias,
        query_pre_attn_scalar=reader.get("attention_multiplier", 1.0) ** -2,
        **({} if rope is _OF_CONFIG else {"rope": rope}),
    )
    return spec_from(
        reader,
        architecture,
        max_positions=_MAX_POSITIONS,
        attention=attention,
        embedding_scale=float(reader.get("embedding_multiplier", 1.0)),
        residual_multiplier=float(reader.get("residual_multiplier", 1.0)),
        logit_scale=1 / reader.get("logits_scaling", 1.0),
        **family,
    )


def moe_weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Granite MoE, and the Hugging Face tensor it comes from: experts are stacked, gate by up."""
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *stacked_expert_rules(spec))


def stacked_expert_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Routers and experts, none of a model without them."""
    if spec.experts is None:
        return ()
    layers, width, moe = spec.experts.layers, spec.experts.intermediate_size, "block_sparse_moe"
    return (
        *decoder.per_layer(f"{moe}.router.layer.weight", "mlp.router.weight", layers),
        *decoder.per_layer(f"{moe}.input_linear.weight", "mlp.experts.gate", layers, TensorSlice(axis=1, stop=width)),
        *decoder.per_layer(f"{moe}.input_linear.weight", "mlp.experts.up", layers, TensorSlice(axis=1, start=width)),
        *decoder.per_layer(f"{moe}.output_linear.weight", "mlp.experts.down", layers),
    )
