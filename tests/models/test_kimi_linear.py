"""Kimi Linear and Ling 3.0: which layers recur, limits of experts, and tensors under the names that are in use.

Qwen3-Next: the kinds of its layers, what is refused, and what of a checkpoint is not needed.
"""

from __future__ import annotations

import pytest

from checkpoints.rules import as_stored, expand, match
from ferrum_jax.models.families.registry import family_of, spec_of, weights_of
from ferrum_jax.models.spec import CacheGroup
from scripts.published import config_of
from tests.models.tiny import TINY_NEXT

KIMI, LING = spec_of(config_of("Kimi-Linear-48B-A3B")), spec_of(config_of("Ling-3.0-flash"))


def test_layers_of_kimi_linear_are_counted_from_one():
    assert KIMI.attention_layers == (3, 7, 11, 15, 19, 23, 26)
    assert KIMI.attention.rope is None and KIMI.routed_layers == tuple(range(1, 27))


def test_the_last_layer_of_each_group_of_ling_attends():
    assert LING.attention_layers == tuple(range(5, 42, 6)) and LING.attention.head_gate


def test_the_last_experts_of_ling_have_limits_of_two_sizes():
    assert LING.experts is not None
    found = {layer: LING.experts.limits_of(layer) for layer in (33, 34, 35, 39, 40, 41)}
    assert found == {33: (0, 0), 34: (0, 5), 35: (4, 5), 39: (4, 5), 40: (4, 7), 41: (4, 7)}


@pytest.mark.parametrize(
    ("spec", "target", "authors", "saved"),
    [
        (KIMI, "layers.0.mlp.up.weight", "layers.0.mlp.up_proj", "layers.0.block_sparse_moe.up_proj"),
        (LING, "layers.0.attention.o.weight", "layers.0.attention.o_proj", "layers.0.attention.dense"),
    ],
    ids=["Kimi Linear", "Ling"],
)
def test_tensors_have_the_names_of_the_authors_or_of_the_reference_implementation(spec, target, authors, saved):
    rules = family_of(spec.architecture).weight_rules(spec)
    for name in (authors, saved):
        (source,) = expand(as_stored(rules, [f"model.{name}.weight"]))[target]
        assert source.name == f"model.{name}.weight"


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
