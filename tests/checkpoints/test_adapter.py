"""Adapters that PEFT saved become parts of our weights; what does not fit is refused, all of it at once."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import convert, open_checkpoint, read_adapter
from checkpoints.adapters.lora import WEIGHTS
from checkpoints.adapters.peft_config import AdapterConfig
from checkpoints.placement import weight_shapes
from ferrum_jax.models.families import registry
from tests.rows import rows_beside
from tests.support import GOLDENS

ADAPTERS = GOLDENS / "adapters"
Q = "base_model.model.model.layers.1.self_attn.q_proj"


def weights_of(family: str) -> registry.Weights:
    return registry.weights_of(json.loads((GOLDENS / family / "config.json").read_text()))


def read(path, family="llama", max_rank=None):
    weights = weights_of(family)
    return read_adapter(path, rules=weights.rules, weights=weight_shapes(weights.targets), max_rank=max_rank)


@pytest.fixture
def changed(tmp_path):
    """Makes a copy of an adapter with another config or other tensors, None for those to leave out."""

    def make(tensors=(), name="llama_attention", **config):
        folder = tmp_path / "adapter"
        shutil.copytree(ADAPTERS / name, folder)
        own = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(own | config))
        kept = load_file(folder / WEIGHTS) | dict(tensors)
        save_file({key: array for key, array in kept.items() if array is not None}, folder / WEIGHTS)
        return folder

    return make


def test_ranks_and_scales_follow_the_patterns_and_the_root():
    parts = read(ADAPTERS / "llama_patterns").parts
    assert {name.split(".", 2)[2] for name in parts} == {
        *(f"attention.{x}.weight" for x in "qkvo"),
        *(f"mlp.{x}.weight" for x in ("gate", "up", "down")),
    }
    assert parts["layers.1.attention.q.weight"].rank == 8 and parts["layers.0.attention.q.weight"].rank == 6
    scales = {name: parts[name].scale for name in ("layers.0.mlp.down.weight", "layers.1.mlp.gate.weight")}
    assert scales == {"layers.0.mlp.down.weight": 9 / 3**0.5, "layers.1.mlp.gate.weight": 5 / 6**0.5}
    assert parts["layers.2.mlp.up.weight"].scale == 12 / 6**0.5
    assert parts["layers.0.mlp.down.weight"].delta().shape == (60, 92)


def test_experts_of_one_parameter_are_told_apart_by_shape_and_stacked():
    adapter = read(ADAPTERS / "qwen3_moe_experts", "qwen3_moe")
    tensors = load_file(ADAPTERS / "qwen3_moe_experts" / WEIGHTS)
    block = "base_model.model.model.layers.1.mlp.experts"
    a, b = (tensors[f"{block}.base_layer.lora_{x}.weight"] for x in "AB")
    up, down = (adapter.parts[f"layers.1.mlp.experts.{x}"] for x in ("up", "down"))
    assert up.delta().shape == (12, 26, 44) and down.delta().shape == (12, 44, 26)
    np.testing.assert_allclose(up.delta()[3], up.scale * b.reshape(52, 4, 12)[26:, :, 3] @ a[12:16], rtol=1e-5)


def test_experts_that_are_modules_of_their_own_are_stacked_and_others_are_zero(tmp_path, changed):
    rng = np.random.default_rng(0)
    name = "base_model.model.model.layers.1.mlp.experts.5.down_proj"
    a, b = rng.standard_normal((4, 26), np.float32), rng.standard_normal((44, 4), np.float32)
    folder = changed({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    tensors = {key: array for key, array in load_file(folder / WEIGHTS).items() if "experts" in key}
    save_file(tensors, folder / WEIGHTS)
    delta = read(folder, "qwen3_moe").parts["layers.1.mlp.experts.down"].delta()
    np.testing.assert_allclose(delta[5], 2 * b @ a, rtol=1e-5)
    assert not np.delete(delta, 5, axis=0).any()


def test_the_head_of_a_model_that_shares_it_is_a_part_of_its_own(changed):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((4, 60), np.float32), rng.standard_normal((300, 4), np.float32)
    folder = changed({f"base_model.model.lm_head.lora_{x}.weight": y for x, y in (("A", a), ("B", b))})
    np.testing.assert_array_equal(read(folder).parts["head.weight"].a, a)


def test_the_digest_is_of_numbers_and_scales_and_not_of_the_path(changed):
    same, other = read(ADAPTERS / "llama_attention"), read(changed(lora_alpha=16))
    assert same.digest == read(ADAPTERS / "llama_attention").digest != other.digest


def test_all_that_does_not_fit_is_said_at_once(changed):
    nan = np.full((4, 60), np.nan, np.float32)
    wide = np.zeros((84, 4), np.float32)
    folder = changed(
        {
            f"{Q}.lora_A.weight": nan,
            f"{Q}.lora_B.weight": wide,
            f"{Q.replace('q_proj', 'k_proj')}.lora_A.weight": nan[:, :7] * 0 + 1,
            f"{Q.replace('q_proj', 'v_proj')}.lora_B.weight": wide,
            f"{Q.replace('q_proj', 'r_proj')}.lora_A.weight": np.ones((4, 60), np.float32),
            f"{Q.replace('q_proj', 'r_proj')}.lora_B.weight": wide,
            "base_model.model.model.embed_tokens.lora_embedding_A": wide,
        }
    )
    with pytest.raises(ValueError, match="does not fit this model") as raised:
        read(folder, max_rank=2)
    for expected in rows_beside(__file__)["all that does not fit"]:
        assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *rows_beside(__file__)["what is no plain lora is refused by name"],
        ({"lora_alpha": 10**400}, r"lora_alpha is a whole number of 1,329 bits; it must be a number above 0"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(changed, config, expected):
    with pytest.raises(ValueError, match=expected) as refused:
        read(changed(**config))
    assert "says 1" not in str(refused.value), "a config with a problem is not blamed for ranks that it does not name"


def test_numbers_that_are_not_floating_point_and_halves_that_come_twice_are_refused(changed):
    ones = np.ones((4, 60))
    named = {f"{Q}.lora_A.weight": ones.astype(np.int64), f"{Q[17:]}.lora_A.weight": ones.astype(np.float32)}
    with pytest.raises(
        ValueError, match=r"(?s)is of int64; A and B are of .*lora_A.weight is there twice, with and wi"
    ):
        read(changed(named))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_trained_where_the_base_has_them_and_nowhere_else(changed, bias):
    assert read(changed(bias=bias)).digest == read(ADAPTERS / "llama_attention").digest
    config = AdapterConfig.of({"r": 4, "lora_alpha": 8, "bias": bias})
    assert config.bias_problem(["layers.0.q_proj.bias"], ["layers.0.q_proj"]).startswith(
        f"bias is '{bias}', and 1 bias"
    )
    assert (config.bias_problem(["layers.0.conv.bias"], ["layers.0.q_proj"]) is None) == (bias == "lora_only")


def test_the_biases_of_a_base_that_has_some_are_missed_by_their_number(changed):
    with pytest.raises(ValueError, match="bias is 'all', and 6 biases of the base were trained: merge it with PEFT"):
        read(changed(bias="all"), "qwen2")


def test_an_adapter_of_another_base_is_refused():
    with pytest.raises(ValueError, match=r"its base is said to be 'llama'"):
        read(ADAPTERS / "llama_attention", "qwen3_moe")


def test_convert_adds_the_adapter_to_the_weights(tmp_path):
    weights, adapter = weights_of("llama"), read(ADAPTERS / "llama_patterns")
    plain = convert(GOLDENS / "llama", tmp_path / "plain", **weights._asdict(), dtype="float32")
    merged = convert(GOLDENS / "llama", tmp_path / "merged", **weights._asdict(), dtype="float32", adapter=adapter)
    assert merged.source_digest != plain.source_digest
    base, made = (
        open_checkpoint(tmp_path / name).load(rules=(), harmless=(), targets=weights.targets)
        for name in ("plain", "merged")
    )
    for name, array in base.items():
        expected = np.asarray(array) + (adapter.parts[name].delta() if name in adapter.parts else 0)
        np.testing.assert_allclose(np.asarray(made[name]), expected, atol=1e-6)


def test_an_adapter_is_not_merged_where_it_would_mean_something_else(tmp_path, changed):
    head = np.ones((4, 60), np.float32)
    folder = changed(
        {
            "base_model.model.lm_head.lora_A.weight": head,
            "base_model.model.lm_head.lora_B.weight": np.ones((300, 4), np.float32),
        }
    )
    with pytest.raises(ValueError, match="shares with its embedding"):
        convert(GOLDENS / "llama", tmp_path / "out", **weights_of("llama")._asdict(), adapter=read(folder))


def test_a_head_that_was_trained_whole_takes_the_place_of_the_base_s(tmp_path, changed):
    head = np.random.default_rng(2).standard_normal((320, 44)).astype(np.float32)
    named = {"base_model.model.lm_head.weight": head}
    folder = changed(named, name="qwen3_moe_experts", modules_to_save=["lm_head"])
    adapter, own = read(folder, "qwen3_moe"), weights_of("qwen3_moe")
    convert(GOLDENS / "qwen3_moe", tmp_path / "out", **own._asdict(), dtype="float32", adapter=adapter)
    made = open_checkpoint(tmp_path / "out").load(rules=(), harmless=(), targets=own.targets)
    np.testing.assert_array_equal(np.asarray(made["head.weight"]), head)
