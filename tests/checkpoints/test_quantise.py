"""Dense weights are quantised while they load: to the definition, in parts, from folders and from memory alike."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import Rule, convert, open_checkpoint
from checkpoints.formats.quantise import quantised
from checkpoints.memory import copies_of, take
from checkpoints.stored_weight import made_form
from ferrum_jax.config import EngineConfig
from ferrum_jax.models.families.registry import quantised_spec, spec_of
from tests.support import GOLDENS

DENSE = np.random.default_rng(0).standard_normal((3, 6, 32)).astype(np.float32)
DENSE[0, 0] = 0
FORMS = ("int8", "int8-a16", "fp8", "int4-g8", "mxfp4")
# Error, of the largest of those that share a scale.
MOST = {
    "int8": 1 / 254,
    "fp8_e4m3": 1 / 27,
    "int4": 1 / 13,
    "mxfp4": 1 / 4,
}


def form_of(text: str):
    form = made_form(text)
    assert form is not None
    return form


@pytest.mark.parametrize("text", FORMS)
def test_every_weight_is_within_half_a_code_and_slices_match_the_whole(text):
    form = form_of(text)
    weight = quantised("w", DENSE, form)
    groups = DENSE.reshape(3, 6, -1, form.group or 32)
    allowed = np.max(np.abs(groups), axis=-1, keepdims=True) * MOST[form.kind] * 1.001
    assert (np.abs(np.asarray(weight).reshape(groups.shape) - groups) <= allowed).all()
    for leaf in weight.leaf_shapes:
        whole, part = np.asarray(weight.leaf(leaf)), weight.leaf(leaf)[1:3, ::2]
        np.testing.assert_array_equal(np.asarray(part), whole[1:3, ::2])


def test_mxfp4_has_the_nearest_codes_and_the_specified_scales():
    values = np.array([[0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.1, 6, 7.9, -0.2, -0.26, -5, -6.5, 0] * 2], np.float32)
    expected = [0, 0, 1, 1, 2, 2, 4, 4, 6, 6, 6, 0, -0.5, -4, -6, 0] * 2
    for factor, byte in ((1, 127), (2**-20, 107), (2**30, 157)):
        weight = quantised("w", values * np.float32(factor), form_of("mxfp4"))
        assert np.asarray(weight.leaf("scales")).tolist() == [[byte]]
        np.testing.assert_array_equal(np.asarray(weight)[0], np.array(expected, np.float32) * factor)


@pytest.mark.parametrize("text", FORMS)
def test_a_folder_our_own_checkpoint_and_arrays_in_memory_give_the_same_codes(tmp_path, text):
    source, dense = tmp_path / "hf", DENSE[1]
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file({"w": dense}, source / "model.safetensors")
    rules = (Rule(source="w", target="w"),)
    plain = {"w": jax.ShapeDtypeStruct(dense.shape, "float32")}
    convert(source, tmp_path / "own", rules=rules, harmless=(), targets=plain)
    targets = {f"w.{leaf}": jax.ShapeDtypeStruct(*own) for leaf, own in form_of(text).leaves((6, 32)).items()}
    found = [
        open_checkpoint(path).load(rules=rules, harmless=(), targets=targets) for path in (source, tmp_path / "own")
    ]
    found += [take({"w": array}, targets) for array in (dense, jnp.asarray(dense))]
    expected = quantised("w", dense, form_of(text))
    for arrays in found:
        assert set(arrays) == set(targets)
        for name, array in arrays.items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(expected.leaf(name.removeprefix("w."))))


def test_weights_that_are_not_finite_or_already_quantised_are_refused():
    with pytest.raises(ValueError, match="w has weights that are not finite"):
        np.asarray(quantised("w", np.full((2, 4), np.inf, np.float32), form_of("int8")).leaf("codes"))
    for text in ("int3", "int4-g7", "int8-g32", "w8a8"):
        with pytest.raises(ValueError, match=f"weights is '{text}'; it must be 'auto', 'int8'"):
            EngineConfig(weights=text)
    packed = spec_of(json.loads((GOLDENS / "gpt_oss_mxfp4" / "config.json").read_text()))
    with pytest.raises(ValueError, match=r"weights is 'int8', and the checkpoint's are quantised already \(mxfp4\)"):
        quantised_spec(packed, "int8")


def test_embeddings_norms_routers_and_the_head_stay_dense():
    spec = spec_of(json.loads((GOLDENS / "qwen3_moe" / "config.json").read_text()))
    names = {name.split(".", 2)[2] for name, _ in quantised_spec(spec, "int4").forms}
    assert names == {
        *(f"attention.{x}.weight" for x in "qkvo"),
        *(f"mlp.{x}.weight" for x in ("gate", "up", "down")),
        *(f"mlp.experts.{x}" for x in ("gate", "up", "down")),
    }


PACKED = {
    "w.codes": np.zeros((2, 8), np.uint8),
    "w.scales": np.ones((2, 2), np.float32),
    "w.zeros": np.zeros((2, 2), np.int8),
    "w.order": np.arange(16, dtype=np.int32),
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": np.ones((2, 16), np.float32)}, "w is dense, and the model keeps it with w.zeros, w.order"),
        ({"w.scales": np.array([[1, 1], [0, 1]], np.float32)}, r"w.scales is 0.0 at \[1, 0\]"),
        ({"w.scales": np.array([[1, 1], [np.nan, 1]], np.float32)}, r"w.scales is nan at \[1, 0\]"),
        ({"w.order": np.zeros(16, np.int32)}, "w.order is no order of inputs; it must have each of 0 to 15 once"),
        ({"w.codes": np.zeros((2, 8), np.float32)}, "w.codes is float32; the model computes in uint8"),
    ],
)
def test_an_update_of_a_part_of_a_form_that_would_mean_something_else_is_refused(given, message):
    targets = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in PACKED.items()}
    assert copies_of(PACKED, targets).keys() == PACKED.keys()
    with pytest.raises(ValueError, match=message):
        copies_of(given, targets, partial=True, cast=True)
