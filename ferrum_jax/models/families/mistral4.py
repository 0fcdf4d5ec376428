"""Mistral4ForCausalLM: DeepSeek's latent attention with YaRN, whose queries far from the start weigh sharper.

Experts are scored by softmax and stored stacked, gate by up.
Source: Mistral AI 2026 (Mistral Small 4); keys as in Hugging Face's Mistral4Config.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import Family
from ferrum_jax.models.families.ministral3 import rope_and_temperature
from ferrum_jax.models.families.plain import spec_from
from ferrum_jax.models.families.rope_reader import mapping
from ferrum_jax.models.spec import ModelSpec


def _spec(reader: ConfigReader) -> ModelSpec:
    if not mapping(reader, "rope_parameters"):
        raise ValueError("config.json has no 'rope_parameters', which this architecture needs")
    turning = reader.get("qk_rope_head_dim", 64)
    whole = turning + reader.get("qk_nope_head_dim", 64)
    rope, temperature = rope_and_temperature(reader, turning_share=turning / whole)
    attention = deepseek.latent_attention_from(reader, rope=rope, temperature=temperature)
    return spec_from(
        reader, attention=attention, experts=deepseek.experts_from(reader, scoring="softmax", corrected=False)
    )


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    assert spec.experts is not None
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return (
        *tensors.frame_rules(spec),
        *deepseek.attention_rules(spec),
        *tensors.mlp_rules(spec),
        *tensors.stacked_expert_rules(spec.experts, gate_up, down, router="mlp.gate.weight"),
        *tensors.shared_expert_rules(spec.experts, "mlp.shared_experts"),
    )


FAMILIES = {
    "Mistral4ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 1048576,
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
        },
        weight_rules=_rules,
        models="Mistral Small 4, text",
        notes=deepseek.LATENT,
    )
}
