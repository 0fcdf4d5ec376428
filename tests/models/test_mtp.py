"""Layers that predict one token more: their drafts against the reference's, their weights, and where their KV are."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint
from ferrum_jax.models.families import registry
from ferrum_jax.models.layers.attention import ForwardContext
from scripts.published import config_of
from tests.golden_table import GOLDENS
from tests.marks import few
from tests.models.test_goldens import assert_close

NAMES = tuple(sorted(path.parent.name for path in (GOLDENS / "mtp").glob("*/golden.npz")))
OF_V3 = config_of("DeepSeek-V3")


@functools.cache
def load(name: str, mtp: bool = True):
    """(spec, structure, parameters in float32, golden arrays) of one folder."""
    checkpoint = open_checkpoint(GOLDENS / "mtp" / name)
    spec = registry.spec_of(checkpoint.config, mtp=mtp).fitted(64)
    graph, targets = registry.unbind(registry.abstract_model(spec))
    rules, harmless = registry.rules_of(spec)
    parameters = checkpoint.load(rules=rules, harmless=harmless, targets=targets)
    return spec, graph, parameters, dict(np.load(GOLDENS / "mtp" / name / "golden.npz"))


def drafts(name: str, first: int = 0):
    """What the model gives, and what each of its layers behind the last drafts, as the golden has it.

    first: the position of a draft's first hidden state.
    """
    spec, graph, parameters, golden = load(name)

    @jax.jit
    def run(parameters, ids):
        model, context = registry.bind(graph, parameters), ForwardContext()
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        found = {"hidden": (hidden := model(ids, positions, context))}
        for depth in range(spec.num_mtp_layers):
            hidden = model.draft(ids[1 + depth :], hidden[:-1], first + positions[: -1 - depth], context, depth)
            found |= {f"draft_{depth}": hidden, f"logits_{depth}": model.logits(hidden)}
        return found

    return run(parameters, golden["prompt"])


@pytest.mark.parametrize("name", few(NAMES, 2))
def test_drafts_of_a_golden_model_are_those_of_the_reference(name):
    found, golden = drafts(name), load(name)[3]
    assert {"prompt", *found} == set(golden)
    for key, value in found.items():
        assert_close(f"{name}: {key}", np.asarray(value), golden[key])


def test_a_draft_may_number_its_positions_by_its_tokens_instead():
    for key, value in drafts("glm4_moe", first=1).items():
        assert_close(key, np.asarray(value), load("glm4_moe")[3][key])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_moe"])
def test_without_asking_for_drafts_a_model_has_its_own_layers_alone(name):
    plain, drafting = load(name, mtp=False), load(name)
    assert plain[0].num_mtp_layers == 0 and not any(path.startswith("mtp.") for path in plain[2])
    assert plain[0].digest_text() == dataclasses.replace(plain[0], num_mtp_layers=0).digest_text()
    assert "num_mtp_layers" not in plain[0].digest_text() and "num_mtp_layers" in drafting[0].digest_text()
    for path, value in plain[2].items():
        np.testing.assert_array_equal(value, drafting[2][path])


def test_layers_that_predict_have_a_cache_group_of_their_own_before_states():
    plain, drafting = (registry.spec_of(config_of("Qwen3-Next-80B-A3B"), mtp=mtp) for mtp in (False, True))
    assert drafting.cache_groups[0] == plain.cache_groups[0] and drafting.cache_groups[-1] == plain.cache_groups[-1]
    assert [group.layers for group in drafting.kv_groups[1:]] == [(48,)]
    assert drafting.routed_layers == plain.routed_layers and drafting.moe_layers == (*plain.moe_layers, 48)
    assert drafting.num_layers == 49


def test_a_layer_of_a_dense_model_that_predicts_has_an_mlp():
    spec = load("qwen3_5")[0]
    assert spec.dense_layers[-1] == spec.num_hidden_layers
    assert "layers.4.mlp.gate.weight" in registry.abstract_parts(spec)[1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_of("Qwen3-0.6B"), "Qwen3ForCausalLM: the layers that predict one token more are not served"),
        (OF_V3 | {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0, and drafts need 1 to 4"),
        (OF_V3 | {"num_nextn_predict_layers": 5}, "num_nextn_predict_layers is 5, and drafts need 1 to 4"),
        (OF_V3 | {"num_nextn_predict_layers": "1"}, 'num_nextn_predict_layers is "1"; it must be a number'),
    ],
)
def test_a_model_without_layers_that_predict_is_refused_by_name(config, said):
    with pytest.raises(ValueError, match=said):
        registry.spec_of(config, mtp=True)


def test_families_whose_layers_that_predict_are_served_have_a_golden_of_them():
    served = {name for name, family in registry.FAMILIES.items() if family.mtp is not None}
    golden = {json.loads((GOLDENS / "mtp" / name / "config.json").read_text())["architectures"][0] for name in NAMES}
    assert golden == {name for name in served if name.endswith("ForCausalLM")}
    beside_images = {name.replace("ForConditionalGeneration", "ForCausalLM") for name in served - golden}
    assert beside_images <= golden | {"KimiK25ForCausalLM"}
