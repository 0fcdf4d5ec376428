"""MiniMaxM2ForCausalLM: experts in every layer, chosen by corrected sigmoid scores; norms over all heads, partial rope.

Source: MiniMax 2025 (MiniMax-M2); keys as in Hugging Face's MiniMaxM2Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec, QkNorm

_MAX_POSITIONS = 196608
_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
# Keys of published configs of which one value is served, and of layers that predict several tokens, which are not.
_ONLY = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
_ONLY |= {"shared_intermediate_size": 0}
_UNREAD = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a MiniMax-M2 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(**_ONLY)
    for key in _UNREAD:
        reader.get(key, None)
    num_layers, head_dim = reader.require("num_hidden_layers"), reader.get("head_dim", 128)
    reader.only(attn_type_list=[1] * num_layers)
    turning = reader.get("rotary_dim", head_dim) / head_dim
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_partial=turning)
    attention = attention_from(
        reader,
        max_positions=_MAX_POSITIONS,
        num_key_value_heads=reader.get("num_key_value_heads", 8),
        head_dim=head_dim,
        qk_norm=QkNorm(over_all_heads=True),
        rope=rope,
    )
    experts = ExpertsSpec(
        layers=tuple(range(num_layers)),
        num_experts=reader.get("num_local_experts", 256),
        num_experts_per_tok=reader.get("num_experts_per_tok", 8),
        intermediate_size=reader.require("intermediate_size"),
        scoring="sigmoid",
        corrected=True,
        norm_topk_prob=True,
    )
    return spec_from(reader, "MiniMaxM2ForCausalLM", max_positions=_MAX_POSITIONS, attention=attention, experts=experts)


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of a MiniMax-M2, and the Hugging Face tensor it comes from."""
    experts = decoder.expert_rules(spec, block="block_sparse_moe", names=_EXPERTS, correction="e_score_correction_bias")
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *experts)


def harmless_tensors(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, and the layers that predict several tokens at once, which are not served."""
    return (*decoder.harmless_tensors(spec), "model.mtp.*")
