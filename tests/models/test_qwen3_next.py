"""Qwen3-Next: the kinds of its layers, what is refused, and what of a checkpoint is not needed."""

from __future__ import annotations

import pytest

from checkpoints.rules import match
from ferrum_jax.models.registry import spec_of, weights_of
from ferrum_jax.spec import CacheGroup
from scripts.published import config_of

PUBLISHED = config_of("Qwen3-Next-80B-A3B")

TINY = PUBLISHED | {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 20, "num_experts": 12, "head_dim": 16}


def test_every_fourth_layer_has_attention_unless_layer_types_says_otherwise():
    spec = spec_of(PUBLISHED)
    assert spec.kv_groups == (CacheGroup(kind="full", layers=tuple(range(3, 48, 4))),)
    assert spec.state_layers == tuple(i for i in range(48) if i % 4 != 3)
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    assert spec_of(TINY | {"layer_types": kinds}).state_layers == (0, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*'full_attention', 'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads is 24, no multiple of linear_num_key_heads, 16"),
        ({"partial_rotary_factor": 0.05}, "head_dim is 16, and 0 of its dimensions turn"),
        ({"layer_types": ["linear_attention"] * 4}, "cache_groups are .*'state' must come once at most"),
    ],
)
def test_what_the_family_cannot_be_is_refused_by_name(change, reason):
    with pytest.raises(ValueError, match=reason):
        spec_of(TINY | change)


def test_layers_that_predict_several_tokens_may_be_left_over_and_nothing_else():
    rules, harmless, targets, _ = weights_of(TINY)
    shapes = {name: target.shape for name, target in targets.items()}
    sources = {}
    for rule in rules:
        for target, names in rule.expand():
            shape = shapes[target][1:] if rule.experts else shapes[target]
            sources |= {source.name: shape for source in names}
    assert set(match(rules, harmless, sources | {"mtp.fc.weight": (8, 16)}, shapes)) == set(targets)
    with pytest.raises(ValueError, match=r"model\.mtp\.weight \[3\] is left over"):
        match(rules, harmless, sources | {"model.mtp.weight": (3,)}, shapes)
