"""Qwen3VLMoeForConditionalGeneration: Qwen3-VL over Qwen3's decoder with experts, all of a layer in two tensors.

Source: Bai et al. 2025 (Qwen3-VL); keys and defaults as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule, StoredTensor, TensorSlice
from ferrum_jax.models import qwen3_vl
from ferrum_jax.models.qwen import qwen3_moe_spec_from_config
from ferrum_jax.spec import ModelSpec

_EXPERTS = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a Qwen3-VL with experts. Raises ValueError naming what is missing or not understood."""
    return qwen3_vl.spec_with_text(config, _text_spec)


def _text_spec(config: Mapping[str, Any]) -> ModelSpec:
    """Qwen3's with experts, whose weights always add up to 1."""
    return qwen3_moe_spec_from_config({**_EXPERTS, **config, "norm_topk_prob": True})


def weight_rules(spec: ModelSpec) -> tuple[Rule, ...]:
    """Every parameter of the text model and of the tower, and the Hugging Face tensor it comes from."""
    return tuple(_joined(rule, spec) for rule in qwen3_vl.weight_rules(spec))


def _joined(rule: Rule, spec: ModelSpec) -> Rule:
    """The rule of an expert's matrix, with the tensor [experts, in, out] of all of them, gate beside up."""
    if not rule.experts or spec.experts is None:
        return rule
    width, parameter = spec.experts.intermediate_size, rule.target.rpartition(".")[2]
    part = TensorSlice(transposed=True)
    if parameter in ("gate", "up"):
        start, stop = (0, width) if parameter == "gate" else (width, None)
        part = TensorSlice(axis=2, start=start, stop=stop, transposed=True)
    stack = rule.source.partition("{e}")[0] + ("down_proj" if parameter == "down" else "gate_up_proj")
    return dataclasses.replace(rule, joined=StoredTensor(stack, part))
