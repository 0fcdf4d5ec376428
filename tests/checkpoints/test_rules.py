"""Weight rules: tensors and parameters correspond one to one, or one error says everything."""

import dataclasses

import numpy as np
import pytest

from checkpoints.rules import Rule, StoredTensor, TensorSlice, as_stored, expand, match
from tests.rows import rows_beside

ROWS = rows_beside(__file__)

RULES = (
    Rule(source="embed.weight", target="embedding.weight"),
    Rule(source="layers.{i}.q.weight", target="layers.{i}.q.weight", layers=(0, 2)),
    Rule(source="layers.{i}.experts.{e}.up", target="layers.{i}.up", layers=(2,), experts=2),
)
SOURCES = ROWS["sources"]
TARGETS = {
    "embedding.weight": (7, 3),
    "layers.0.q.weight": (4, 3),
    "layers.2.q.weight": (4, 3),
    "layers.2.up": (2, 5, 3),
}
PLAN = {
    "embedding.weight": (StoredTensor("embed.weight"),),
    "layers.0.q.weight": (StoredTensor("layers.0.q.weight"),),
    "layers.2.q.weight": (StoredTensor("layers.2.q.weight"),),
    "layers.2.up": (StoredTensor("layers.2.experts.0.up"), StoredTensor("layers.2.experts.1.up")),
}


def test_rules_expand_over_layers_and_experts():
    assert expand(RULES) == PLAN


def test_a_checkpoint_that_fits_is_matched():
    assert match(RULES, (), SOURCES, TARGETS) == PLAN


def test_a_stack_of_one_expert_keeps_its_leading_axis():
    rules = (Rule(source="e.{e}", target="e", experts=1),)
    assert match(rules, (), {"e.0": (5, 3)}, {"e": (1, 5, 3)}) == {"e": (StoredTensor("e.0"),)}
    with pytest.raises(ValueError, match=r"tensor e.0 is \[5, 3\], 1 of them stacked; parameter e wants \[5, 3\]"):
        match(rules, (), {"e.0": (5, 3)}, {"e": (5, 3)})


def test_harmless_leftovers_are_left_over_in_silence():
    sources = SOURCES | {"layers.0.rotary_emb.inv_freq": (2,), "lm_head.weight": (7, 3)}
    assert match(RULES, ("*.rotary_emb.inv_freq", "lm_head.weight"), sources, TARGETS) == PLAN


def test_everything_that_does_not_fit_is_in_one_error():
    sources = SOURCES | {"layers.0.q.weight": (3, 4), "layers.0.q.bias": (4,)}
    del sources["embed.weight"], sources["layers.2.experts.1.up"]
    targets = TARGETS | {"norm.weight": (3,)}
    del targets["layers.2.q.weight"]
    with pytest.raises(ValueError) as error:
        match(RULES, (), sources, targets)
    assert str(error.value).splitlines() == rows_beside(__file__)["mismatches"]


def test_two_rules_for_one_tensor_or_one_parameter_are_refused():
    with pytest.raises(ValueError, match=r"more than once: \['a', 'x'\]"):
        expand((Rule(source="x", target="a"), Rule(source="y", target="a"), Rule(source="x", target="b")))


@pytest.mark.parametrize("wrong", ROWS["placeholders that do not fit layers and experts are refused"])
def test_placeholders_that_do_not_fit_layers_and_experts_are_refused(wrong):
    with pytest.raises(ValueError, match="belongs in both names"):
        Rule(**wrong)


def fused(up: TensorSlice, down: TensorSlice | None = None) -> tuple[Rule, ...]:
    """Gate and up are the even and odd columns of one tensor, down lies the other way round in another."""
    return (
        Rule(source="gate_up", target="gate", part=TensorSlice(axis=2, step=2, transposed=True)),
        Rule(source="gate_up", target="up", part=up),
        Rule(source="down", target="down", part=down or TensorSlice(transposed=True)),
    )


ODD = TensorSlice(axis=2, start=1, step=2, transposed=True)
FUSED_SOURCES = {"gate_up": (4, 3, 10), "down": (4, 5, 3)}
FUSED_TARGETS = {"gate": (4, 5, 3), "up": (4, 5, 3), "down": (4, 3, 5)}


def test_a_part_is_a_view_of_rows_and_may_be_transposed():
    tensors = {"gate_up": np.arange(120).reshape(FUSED_SOURCES["gate_up"]), "down": np.zeros(FUSED_SOURCES["down"])}
    plan = match(fused(ODD), (), FUSED_SOURCES, FUSED_TARGETS)
    (up,) = plan["up"]
    np.testing.assert_array_equal(up.of(tensors), tensors["gate_up"].swapaxes(1, 2)[:, 1::2])
    assert np.shares_memory(up.of(tensors), tensors["gate_up"])
    assert str(up) == "gate_up[:, :, 1::2].T"
    assert {name: plan[name][0].of(tensors).shape for name in plan} == FUSED_TARGETS


@pytest.mark.parametrize(
    ("up", "message"),
    [
        (TensorSlice(axis=2, step=2, transposed=True), r"more than once: \['gate_up\[:, :, ::2\].T'\]"),
        (TensorSlice(axis=2, start=3, step=2, transposed=True), r"row 1 of axis 2 is taken by 0 parameters"),
        (TensorSlice(axis=2, start=0, stop=5, transposed=True), r"row 0 of axis 2 is taken by 2 parameters"),
        (
            TensorSlice(axis=2, start=1, step=2),
            r"gate_up is \[4, 3, 10\] and gate_up\[:, :, 1::2\] is taken; parameter up",
        ),
        (TensorSlice(axis=3), r"tensor gate_up is \[4, 3, 10\] and gate_up\[:, :, :, :\] is taken; parameter up"),
        (None, r"more than once: \['gate_up'\]"),
    ],
)
def test_parts_that_do_not_make_up_their_tensor_are_refused(up, message):
    targets = FUSED_TARGETS | ({"up": (4, 4, 3)} if up is not None and up.start == 3 else {})
    with pytest.raises(ValueError, match=message):
        match(fused(up), (), FUSED_SOURCES, targets)


def test_a_layer_may_have_a_smaller_number_in_the_checkpoint_than_in_the_model():
    rule = Rule(source="mtp.layers.{i}.w", target="layers.{i}.w", layers=(4, 5), shift=4)
    assert [(target, str(*sources)) for target, sources in rule.expand()] == [
        ("layers.4.w", "mtp.layers.0.w"),
        ("layers.5.w", "mtp.layers.1.w"),
    ]
    stacked = dataclasses.replace(
        rule, source="mtp.layers.{i}.{e}", experts=2, instead=(StoredTensor("mtp.layers.{i}.all"),)
    )
    (found,) = as_stored([stacked], ["mtp.layers.0.all", "mtp.layers.1.all", "model.norm"])
    assert [str(*sources) for _, sources in found.expand()] == ["mtp.layers.0.all", "mtp.layers.1.all"]
