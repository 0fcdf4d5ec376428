"""Glm4ForCausalLM, Glm4MoeForCausalLM and Glm4MoeLiteForCausalLM: GLM-4-0414, GLM-4.5 to 4.7, and GLM-4.7-Flash.

The last two have experts chosen as in DeepSeek-V3, and the last its latent attention; in the others half of each head
turns. GLM-4 turns neighbours together, has norms on both sides of attention and MLP, and joins gate and up in one
tensor. Layers behind the last predict one token more, for drafts.
Source: GLM Team 2024, 2025; keys as in Hugging Face's configs.
"""

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.mtp import MtpLayers, rules_in_layers
from ferrum_jax.models.families.plain import attention_from, norm_from, sparse_layers, spec_from
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import ModelSpec, QkNorm

_NORMS = tensors.BEFORE | {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}


def _spec(reader: ConfigReader) -> ModelSpec:
    rope = rope_from(reader, interleaved=True)
    attention = attention_from(reader, bias=reader.flag("attention_bias"), rope=rope)
    return spec_from(reader, attention=attention, norm=norm_from(reader, after=True))


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (*tensors.frame_rules(spec, _NORMS), *tensors.attention_rules(spec), *tensors.fused_mlp_rules(spec))


def _moe(reader: ConfigReader) -> ModelSpec:
    reader.leave("num_nextn_predict_layers")  # layers behind the last, which `Family.mtp` counts
    norm = QkNorm() if reader.flag("use_qk_norm") else None
    attention = attention_from(reader, bias=reader.flag("attention_bias"), qk_norm=norm)
    return spec_from(reader, attention=attention, experts=deepseek.experts_from(reader))


def _moe_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return (*tensors.weight_rules(spec, experts={"shared": "shared_experts"}), *rules_in_layers(spec))


def _lite(reader: ConfigReader) -> ModelSpec:
    reader.leave("num_nextn_predict_layers")
    reader.only(topk_method="noaux_tc")
    layers = sparse_layers(reader, reader.get("first_k_dense_replace", 1))
    experts = deepseek.experts_from(reader, layers)
    return spec_from(reader, attention=deepseek.latent_attention_from(reader), experts=experts)


FAMILIES = {
    "Glm4ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-7,
        },
        weight_rules=_rules,
        models="GLM-4-0414",
    ),
    "Glm4MoeForCausalLM": Family(
        read=_moe,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
        },
        weight_rules=_moe_rules,
        harmless=deepseek.harmless_tensors,
        mtp=MtpLayers(),
        models="GLM-4.5 to 4.7, GLM-4.5-Air",
        notes=ONE_TOKEN,
    ),
    "Glm4MoeLiteForCausalLM": deepseek.family(
        read=_lite,
        defaults={
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
        },
        mtp=MtpLayers(),
        models="GLM-4.7-Flash",
        notes=deepseek.LATENT,
    ),
}
