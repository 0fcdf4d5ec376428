"""MiniMaxM2ForCausalLM: experts in every layer, chosen by corrected sigmoid scores; norms over all heads, partial rope.

Source: MiniMax 2025 (MiniMax-M2); keys as in Hugging Face's MiniMaxM2Config.
"""

import functools

from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.plain import attention_from, experts_from, spec_from
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import ModelSpec, QkNorm

# Keys of published configs with one value that is served, and keys of layers that predict several tokens.
_ONLY = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
_ONLY |= {"shared_intermediate_size": 0}
_EXPERTS = tensors.MIXTRALS_EXPERTS | {"correction": "e_score_correction_bias"}


def _spec(reader: ConfigReader) -> ModelSpec:
    reader.only(**_ONLY)
    reader.leave("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    reader.only(attn_type_list=[1] * reader.require("num_hidden_layers"))
    head_dim = reader.get("head_dim", 128)
    rope = rope_from(reader, partial_rotary_factor=reader.get("rotary_dim", head_dim) / head_dim)
    chosen = {"scoring": "sigmoid", "corrected": True, "norm_topk_prob": True}
    return spec_from(
        reader,
        attention=attention_from(reader, qk_norm=QkNorm(over_all_heads=True), rope=rope),
        experts=experts_from(reader, reader.get("num_local_experts", 256), **chosen),
    )


FAMILIES = {
    "MiniMaxM2ForCausalLM": Family(
        read=_spec,
        defaults={
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts_per_tok": 8,
        },
        weight_rules=functools.partial(tensors.weight_rules, experts=_EXPERTS),
        harmless=with_unserved("model.mtp.*"),
        models="MiniMax-M2",
        notes=f"in bfloat16; {ONE_TOKEN}",
    )
}
