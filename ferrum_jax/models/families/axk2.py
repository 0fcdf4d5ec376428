"""AXK2ForCausalLM (A.X K2): DeepSeek-V3.2, with gates behind norms and behind attention.

The norms before attention and before experts are followed by a gate of low rank. Queries are made of their latent as it
is before its norm and behind it, and bring a gate for each value that attention gives. Experts outside the chosen
groups stand at 0 and not below all others.
Source: SK Telecom 2026 (A.X K2); keys and defaults as in Hugging Face's AXK2Config.
"""

import dataclasses

from checkpoints.rules import Rule
from ferrum_jax.models.families import deepseek, tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family
from ferrum_jax.models.families.plain import norm_from, spec_from
from ferrum_jax.models.spec import AttentionSpec, ModelSpec

_GATE = {"norm": "weight", "W_down": "down.weight", "W_up": "up.weight"}  # a gated norm's tensors, and ours


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, ep_size=1, mlp_bias=False)
    reader.leave("num_nextn_predict_layers", "num_mtp_layers")  # of layers behind the last
    return spec_from(
        reader,
        attention=_attention(reader),
        experts=deepseek.experts_from(reader, deepseek.with_experts(reader), zero_outside=True),
        norm=norm_from(reader, gate_rank=reader.get("gated_norm_rank", 16)),
    )


def _attention(reader: ConfigReader) -> AttentionSpec:
    own = deepseek.latent_attention_from(reader, gate=True, indexer=deepseek.indexer_from(reader))
    assert own.latent is not None
    return dataclasses.replace(own, latent=dataclasses.replace(own.latent, raw_queries=True))


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    every, dense = tuple(range(spec.num_hidden_layers)), spec.dense_layers
    return (
        *tensors.frame_rules(spec, norms={}),
        *_gated("input_layernorm", "attention_norm", every),
        *_gated("post_attention_layernorm", "mlp_norm", spec.moe_layers),
        *tensors.per_layer("post_attention_layernorm.weight", "mlp_norm.weight", dense),
        *deepseek.attention_rules(spec),
        *tensors.mlp_rules(spec),
        *tensors.expert_rules(spec, shared="shared_experts"),
    )


def _gated(theirs: str, ours: str, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    names = {f"{theirs}.{part}.weight": f"{ours}.{own}" for part, own in _GATE.items()}
    return tensors.in_layers(names, layers)


FAMILIES = {
    "AXK2ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 131072,
            "q_lora_rank": 384,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
            "index_n_heads": 16,
            "n_routed_experts": 128,
            "moe_intermediate_size": 512,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
        weight_rules=_rules,
        harmless=deepseek.harmless_tensors,
        models="A.X K2, K2-Light",
        notes=f"{deepseek.CHOSEN}; {ONE_TOKEN}",
    )
}
