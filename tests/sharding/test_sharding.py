"""The table of logical axes, and what does not divide: repeated, padded or refused by name."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from checkpoints import open_checkpoint
from checkpoints.fingerprints import fingerprints
from checkpoints.placement import place
from checkpoints.rules import Expansion
from ferrum_jax.config import EngineConfig
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.models.families.registry import abstract_encoder, encoder_spec_of, spec_of, unbind
from ferrum_jax.models.sharding import axes_of, make_mesh, partition
from ferrum_jax.models.sharding.undivided import refusals
from scripts.published import FAST, config_of
from tests.models.test_registry import published
from tests.rows import rows_beside
from tests.support import GOLDENS, ROOT

LLAMA3_8B = config_of("Llama-3-8B")
QWEN3_30B_A3B = config_of("Qwen3-30B-A3B")

KV_HEADS = Expansion(rows=6, size=12, run=2, repeats=2)  # 3 heads of 2 rows, each on two devices
VOCABULARY = Expansion(rows=6, size=8)


@pytest.mark.parametrize("name", FAST)
def test_every_parameter_of_a_published_model_has_an_axis_for_each_dimension(name):
    _, parameters = published(name)
    for path, parameter in parameters.items():
        assert len(axes_of(path)) == len(parameter.shape), path


def test_every_parameter_of_an_encoder_has_an_axis_for_each_dimension():
    config = json.loads((GOLDENS / "encoders" / "bert" / "config.json").read_text())
    _, parameters = unbind(abstract_encoder(encoder_spec_of(config)))
    for path, parameter in parameters.items():
        assert len(axes_of(path)) == len(parameter.shape), path
    assert partition(*axes_of("layers.1.q.weight")) == PartitionSpec("tp", None)
    assert partition(*axes_of("layers.1.down.weight")) == PartitionSpec(None, "tp")


def test_an_unknown_parameter_is_an_error_that_names_the_table():
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.lever\.weight has no logical axes; add a line to ferrum_jax/models/sharding/parameters.py",
    ):
        axes_of("layers.0.lever.weight")


def test_projections_are_split_by_columns_and_those_after_them_by_rows():
    assert partition(*axes_of("layers.3.attention.k.weight")) == PartitionSpec("tp", None)
    assert partition(*axes_of("layers.3.attention.o.weight")) == PartitionSpec(None, "tp")
    assert partition(*axes_of("layers.3.mlp.up.weight")) == PartitionSpec("tp", None)
    assert partition(*axes_of("layers.3.mlp.down.weight")) == PartitionSpec(None, "tp")
    assert partition(*axes_of("layers.3.mlp.experts.down")) == PartitionSpec(("dp", "tp"), None, None)
    assert partition(*axes_of("layers.3.attention.q_norm.weight")) == PartitionSpec(None)


@pytest.mark.parametrize(
    ("text", "shape"), [("tp=4", (1, 4)), ("dp=2,tp=4", (2, 4)), ("tp=1", (1, 1)), ("tp=2, dp=3", (3, 2))]
)
def test_a_mesh_is_read_from_its_text(text, shape):
    mesh = MeshShape.parse(text)
    assert (mesh.dp, mesh.tp) == shape and mesh == MeshShape.parse(str(mesh))


@pytest.mark.parametrize(
    ("text", "shape", "ep"),
    [("ep=4", (4, 1), 4), ("dp=2,tp=2", (2, 2), 4), ("dp=2,tp=2,ep=4", (2, 2), 4), ("tp=2,ep=2,dp=2", (2, 2), 2)],
)
def test_experts_are_spread_over_all_devices_unless_a_mesh_says_otherwise(text, shape, ep):
    mesh = MeshShape.parse(text)
    assert (mesh.dp, mesh.tp) == shape and mesh.ep == ep and mesh == MeshShape.parse(str(mesh))


def test_a_config_parses_its_mesh_once_and_keeps_the_text_as_it_was_given():
    config = EngineConfig(mesh="tp=2, dp=3")
    assert config.mesh_shape is config.mesh_shape == MeshShape(dp=3, tp=2) and config.mesh == "tp=2, dp=3"
    assert dataclasses.replace(config, mesh="tp=4").mesh_shape == MeshShape(tp=4), "a changed copy has its own shape"
    assert EngineConfig(**dataclasses.asdict(config)) == config, "it survives JSON"
    calls = [path for path in (ROOT / "ferrum_jax").rglob("*.py") if "MeshShape.parse" in path.read_text()]
    assert [path.name for path in calls] == ["config.py"]


def test_experts_over_impossible_numbers_of_devices_are_refused():
    with pytest.raises(ValueError, match=r"mesh is 'dp=2,tp=2,ep=3'; ep is 3, .*: ep may be 2 or 4$"):
        EngineConfig(mesh="dp=2,tp=2,ep=3")


@pytest.mark.parametrize("text", ["", "4", "tp", "tp=0", "tp=-1", "tp=2,tp=2", "pp=2", "tp=x"])
def test_a_mesh_that_is_none_is_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"mesh is '.*'; it must name numbers of devices.*'dp=2,tp=4'"):
        EngineConfig(mesh=text)


def test_more_devices_than_there_are_is_an_error_that_says_how_many():
    with pytest.raises(ValueError, match=r"mesh is 'tp=64', 64 devices, and there are 1"):
        make_mesh(MeshShape(tp=64), jax.devices()[:1])


@pytest.mark.parametrize(
    ("config", "tp", "reason"),
    [
        (
            LLAMA3_8B,
            3,
            r"mesh is 'tp=3': num_attention_heads, 32, is not a multiple of tp, 3, .*; tp may be 1, 2, 4, 8, 16, 32$",
        ),
        (LLAMA3_8B, 64, "num_attention_heads, 32, is not a multiple of tp, 64"),
        (LLAMA3_8B | {"num_key_value_heads": 8, "num_attention_heads": 24}, 12, "num_key_value_heads, 8, and tp, 12"),
        (LLAMA3_8B | {"intermediate_size": 100}, 8, "intermediate_size, 100, is not a multiple of tp, 8"),
        (QWEN3_30B_A3B | {"num_experts": 30}, 4, r"num_experts, 30, is not a multiple of tp, 4; tp may be 1, 2"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused_with_those_that_do(config, tp, reason):
    spec = spec_of(config)
    assert refusals(spec, MeshShape(tp=1)) == []
    (refusal,) = refusals(spec, MeshShape(tp=tp))
    assert re.search(reason, refusal)


def test_experts_that_do_not_divide_among_devices_are_refused():
    spec = spec_of(QWEN3_30B_A3B | {"num_experts": 24})
    assert refusals(spec, MeshShape(dp=2, tp=4)) == refusals(spec, MeshShape.parse("dp=16,tp=8,ep=8")) == []
    (some,) = refusals(spec, MeshShape(dp=4, tp=4))
    assert some.endswith("num_experts, 24, is not a multiple of dp * tp, 16; tp may be 1, 2"), some
    (none,) = refusals(spec, MeshShape(dp=16, tp=4))
    assert none.endswith("tp may be 1 with ep=1, 2 with ep=2, 4 with ep=4, 8 with ep=8"), none


@pytest.mark.parametrize(
    ("golden", "tp", "reason"),
    rows_beside(__file__)["a mesh that parts a group of inputs is refused with those that do not"],
)
def test_a_mesh_that_parts_a_group_of_inputs_is_refused_with_those_that_do_not(golden, tp, reason):
    checkpoint = open_checkpoint(GOLDENS / "quantised" / golden)
    found = refusals(spec_of(checkpoint.config, stored=checkpoint.stored_forms), MeshShape(tp=tp))
    assert (reason in found[0] and found[0].endswith("; tp may be 1, 2")) if reason else not found


def test_fewer_kv_heads_than_devices_and_an_odd_vocabulary_are_no_reason():
    spec = dataclasses.replace(spec_of(LLAMA3_8B), vocab_size=128_257)
    assert refusals(spec, MeshShape(tp=16)) == []


@pytest.mark.parametrize(
    ("expansion", "stored"),
    [(KV_HEADS, [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]), (VOCABULARY, [0, 1, 2, 3, 4, 5, -1, -1])],
    ids=["repeated", "padded"],
)
def test_a_stretched_parameter_repeats_rows_or_adds_zeros(expansion, stored):
    source = np.arange(1, 31, dtype=np.float32).reshape(6, 5)
    target = jax.ShapeDtypeStruct((expansion.size, 5), "float32")
    placed = place([source], target, expansion)
    expected = np.concatenate([source, np.zeros((1, 5), np.float32)])[stored]
    np.testing.assert_array_equal(placed, expected)
    assert fingerprints(("", ""), "", {"a": placed}, {"a": expansion}) == fingerprints(("", ""), "", {"a": source})
    assert expansion.stored(expansion.places(np.arange(6))).tolist() == list(range(6))
