"""Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM: Llama's decoder whose neighbours turn together, and one of experts.

A correction chooses experts, their softmax weighs them; shared experts have no gate.
Source: ERNIE Team 2025 (ERNIE 4.5); keys as in Hugging Face's Ernie4_5Config and Ernie4_5_MoeConfig.
"""

import dataclasses
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models.families import tensors
from ferrum_jax.models.families.config_reader import ConfigReader
from ferrum_jax.models.families.family import ONE_TOKEN, Family, with_unserved
from ferrum_jax.models.families.plain import attention_from, mlp_from, spec_from
from ferrum_jax.models.families.rope_reader import rope_from
from ferrum_jax.models.spec import ExpertsSpec, ModelSpec


def _spec(reader: ConfigReader, **family: Any) -> ModelSpec:
    attention = attention_from(reader, biases="use_bias", rope=rope_from(reader, interleaved=True))
    return spec_from(reader, attention=attention, mlp=mlp_from(reader, biases="use_bias"), **family)


def _moe(reader: ConfigReader) -> ModelSpec:
    reader.only(moe_gate="topk", moe_use_aux_free=True, use_bias=False)
    reader.leave("moe_capacity", "num_nextn_predict_layers")  # of training, and of layers that are left over
    return _spec(reader, experts=_experts(reader))


def _experts(reader: ConfigReader) -> ExpertsSpec | None:
    num_layers, width = reader.require("num_hidden_layers"), reader.get("moe_intermediate_size", 1536)
    first, last = reader.get("moe_layer_start_index", 1), reader.get("moe_layer_end_index", -1)
    step = reader.get("moe_layer_interval", 1)
    reader.leave("moe_norm_min")  # no sum of softmax over the chosen is as small
    last = num_layers - 1 if last == -1 else last
    layers = tuple(i for i in range(num_layers) if first <= i <= last and (i + 1) % step == 0)
    if not layers:
        return None
    return ExpertsSpec(
        layers=layers,
        num_experts=reader.get("moe_num_experts", 64),
        num_experts_per_tok=reader.get("moe_k", 6),
        intermediate_size=width,
        corrected=True,
        norm_topk_prob=True,
        shared_intermediate_size=width * reader.get("moe_num_shared_experts", 2),
        shared_gate=False,
    )


def _moe_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    correction = "moe_statics.e_score_correction_bias"  # [1, E]
    rules = tensors.weight_rules(spec, experts={"correction": correction, "shared": "shared_experts"})
    first = TensorSlice(stop=1, alone=True)
    return tuple(dataclasses.replace(rule, part=first) if correction in rule.source else rule for rule in rules)


_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "Ernie4_5ForCausalLM": Family(read=_spec, defaults=_DEFAULTS | {"head_dim": 128}, models="ERNIE 4.5, text, dense"),
    "Ernie4_5_MoeForCausalLM": Family(
        read=_moe,
        defaults=_DEFAULTS,
        weight_rules=_moe_rules,
        harmless=with_unserved("model.mtp_*"),
        models="ERNIE 4.5, text",
        notes=ONE_TOKEN,
    ),
}
