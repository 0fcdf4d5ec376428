"""Qwen3-Next: the kinds of its layers, what is refused, and what of a checkpoint is not needed."""

from __future__ import annotations

import pytest

from checkpoints.rules import match
from ferrum_jax.models.registry import spec_of, weights_of
from ferrum_jax.spec import CacheGroup
from scripts.published import config_of
from tests.models.tiny import TINY_NEXT

PUBLISHED = config_of("Qwen3-Next-80B-A3B")


def test_every_fourth_layer_has_attention_unless_layer_types_says_otherwise():
    spec = spec_of(PUBLISHED)
    assert spec.kv_groups == (CacheGroup(kind="full", layers=tuple(range(3, 48, 4))),)
    assert spec.state_layers == tuple(i for i in range(48) if i % 4 != 3)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    assert spec_of(TINY_NEXT | {"layer_types": kinds}).state_layers == (0, 3)


def test_layers_that_predict_several_tokens_may_be_left_over_and_nothing_else():
    rules, harmless, targets, _ = weights_of(TINY_NEXT)
    shapes = {name: target.shape for name, target in targets.items()}
    sources = {}
    for rule in rules:
        for target, names in rule.expand():
            shape = shapes[target][1:] if rule.experts else shapes[target]
            sources |= {source.name: shape for source in names}
    assert set(match(rules, harmless, sources | {"mtp.fc.weight": (8, 16)}, shapes)) == set(targets)
    with pytest.raises(ValueError, match=r"model\.mtp\.weight \[3\] is left over"):
        match(rules, harmless, sources | {"model.mtp.weight": (3,)}, shapes)
