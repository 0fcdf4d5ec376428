"""Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM: Llama's decoder whose neighbours turn together, and one of experts.

A correction chooses experts, their softmax weighs them; shared experts have no gate.
Source: ERNIE Team 2025 (ERNIE 4.5); keys as in Hugging Face's Ernie4_5Config and Ernie4_5_MoeConfig.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.models import decoder
from ferrum_jax.models.config_reader import ConfigReader
from ferrum_jax.models.plain import attention_from, mlp_from, norm_from, spec_from
from ferrum_jax.models.rope_reader import rope_from
from ferrum_jax.spec import ExpertsSpec, ModelSpec

_MAX_POSITIONS = 131072


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an ERNIE 4.5 config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    return _spec(reader, "Ernie4_5ForCausalLM", head_dim=reader.get("head_dim", 128))


def moe_spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an ERNIE 4.5 MoE config.json. Raises ValueError naming what is missing or not understood."""
    reader = ConfigReader(config)
    reader.only(moe_gate="topk", moe_use_aux_free=True, use_bias=False)
    for key in ("moe_capacity", "num_nextn_predict_layers"):  # of training, and of layers that are left over
        reader.get(key, None)
    return _spec(reader, "Ernie4_5_MoeForCausalLM", experts=_experts(reader))


def _spec(reader: ConfigReader, architecture: str, *, experts: ExpertsSpec | None = None, **heads: int) -> ModelSpec:
    """What the families read alike."""
    bias = bool(reader.get("use_bias", False))
    rope = rope_from(reader, reader.get("max_position_embeddings", _MAX_POSITIONS), default_theta=500000.0)
    rope = dataclasses.replace(rope, interleaved=True)
    return spec_from(
        reader,
        architecture,
        max_positions=_MAX_POSITIONS,
        attention=attention_from(reader, max_positions=_MAX_POSITIONS, bias=bias, output_bias=bias, rope=rope, **heads),
        mlp=mlp_from(reader, bias=bias),
        experts=experts,
        norm=norm_from(reader, 1e-5),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", True)),
    )


def _experts(reader: ConfigReader) -> ExpertsSpec | None:
    num_layers, width = reader.require("num_hidden_layers"), reader.get("moe_intermediate_size", 1536)
    first, last = reader.get("moe_layer_start_index", 1), reader.get("moe_layer_end_index", -1)
    step = reader.get("moe_layer_interval", 1)
    reader.get("moe_norm_min", None)  # no sum of softmax over the chosen is as small
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


def moe_weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of an ERNIE 4.5 MoE, and the Hugging Face tensor it comes from."""
    correction = "moe_statics.e_score_correction_bias"  # [1, E]
    rules = decoder.expert_rules(spec, correction=correction, shared="shared_experts")
    first = TensorSlice(stop=1, alone=True)
    rules = tuple(dataclasses.replace(rule, part=first) if correction in rule.source else rule for rule in rules)
    return (*decoder.frame_rules(spec), *decoder.attention_rules(spec), *decoder.mlp_rules(spec), *rules)


def moe_harmless(spec: ModelSpec) -> tuple[str, ...]:
    """The decoder's, and the layers that predict several tokens at once, which are not served."""
    return (*decoder.harmless_tensors(spec), "model.mtp_*")
