"""Mistral4ForCausalLM: DeepSeek's latent attention with YaRN, whose queries far from the start weigh sharper.

Experts are scored by softmax and stored stacked, gate by up.
Source: Mistral AI 2026 (Mistral Small 4); keys as in Hugging Face's Mistral4Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.deepseek import attention_rules, experts_from, latent_attention_from
from ferrum_jax.models.ministral3 import rope_and_temperature
from ferrum_jax.models.plain import spec_from
from ferrum_jax.models.rope_reader import mapping
from ferrum_jax.spec import ModelSpec

_MAX_POSITIONS = 1048576
_SIZES = {"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 128}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Mistral 4 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    if not mapping(reader, "rope_parameters"):
        raise ValueError("config.json has no 'rope_parameters', which this architecture needs")
    turning = reader.get("qk_rope_head_dim", 64)
    whole = turning + reader.get("qk_nope_head_dim", _SIZES["qk_nope_head_dim"])
    rope, temperature = rope_and_temperature(
        reader, reader.get("max_position_embeddings", _MAX_POSITIONS), turning_share=turning / whole
    )
    attention = latent_attention_from(reader, _MAX_POSITIONS, rope=rope, temperature=temperature, **_SIZES)
    layers = tuple(range(reader.get("first_k_dense_replace", 0), reader.require("num_hidden_layers")))
    experts = experts_from(
        reader,
        layers,
        num_experts=reader.get("n_routed_experts", 128),
        num_experts_per_tok=reader.get("num_experts_per_tok", 4),
        scoring="softmax",
        corrected=False,
    )
    return spec_from(reader, "Mistral4ForCausalLM", max_positions=_MAX_POSITIONS, attention=attention, experts=experts)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a Mistral 4, and the Hugging Face tensor it comes from."""
    assert spec.experts is not None
    layers, width = spec.experts.layers, spec.experts.intermediate_size
    halves = {"gate": TensorSlice(axis=1, stop=width), "up": TensorSlice(axis=1, start=width)}.items()
    experts = (
        decoder.per_layer("mlp.experts.gate_up_proj", f"mlp.experts.{name}", layers, half) for name, half in halves
    )
    return (
        *decoder.frame_rules(spec),
        *attention_rules(spec),
        *decoder.mlp_rules(spec),
        *decoder.per_layer("mlp.gate.weight", "mlp.router.weight", layers),
        *(rule for rules in experts for rule in rules),
        *decoder.per_layer("mlp.experts.down_proj", "mlp.experts.down", layers),
        *decoder.shared_expert_rules(spec.experts, "mlp.shared_experts"),
    )
