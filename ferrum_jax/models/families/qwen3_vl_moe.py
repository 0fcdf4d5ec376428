"""Qwen3VLMoeForConditionalGeneration: Qwen3-VL over Qwen3's decoder with experts, all of a layer in two tensors.

Source: Bai et al. 2025 (Qwen3-VL); keys and defaults as in Hugging Face's configs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.rules import Rule
from ferrum_jax.models.families import qwen, qwen3_vl, tensors
from ferrum_jax.models.spec import ModelSpec

_EXPERTS = {"num_local_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def _with_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of Qwen3's with experts, whose weights always add up to 1."""
    return {**_EXPERTS, **config, "norm_topk_prob": True}


def _rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return tensors.joined(tensors.weight_rules(spec), spec, transposed=True)


FAMILIES = {
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl.over(
        dataclasses.replace(qwen.QWEN3_MOE, respell=_with_experts, weight_rules=_rules),
        models="Qwen3-VL 30B-A3B, 235B-A22B",
        notes="[with images and videos](../guides/images.md); experts as published, `[in, out]`",
    )
}
