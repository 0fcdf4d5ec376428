"""Hugging Face folders: every float dtype, one file or several, and clear errors for damaged ones."""

import json
import struct
import threading

import jax
import numpy as np
import pytest
import safetensors.numpy

from checkpoints import Rule, open_checkpoint, placement
from checkpoints.huggingface import map_tensors
from checkpoints.placement import place
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single


def load(folder, dtype="float32"):
    return open_checkpoint(folder).load(rules=RULES, harmless=HARMLESS, targets=targets(dtype))


def assert_same(params, expected, dtype="float32"):
    assert list(params) == list(expected)
    for name, array in params.items():
        assert isinstance(array, jax.Array)
        assert array.dtype == dtype
        np.testing.assert_array_equal(np.asarray(array), expected[name].astype(dtype), err_msg=name)


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_weights_load_as_they_are_named_stacked_and_laid_out(tmp_path, write):
    made = tensors()
    assert_same(load(write(tmp_path / "hf", made)), parameters(made))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_any_float_dtype_is_cast_to_the_asked_one(tmp_path, stored, dtype):
    made = tensors(stored)
    assert_same(load(write_single(tmp_path / "hf", made), dtype), parameters(made), dtype)


def test_an_aligned_mapped_tensor_is_not_copied_and_donation_spares_the_file(tmp_path):
    values = np.arange(256 * 64, dtype=np.float32).reshape(256, 64)
    header = json.dumps({"w": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, values.nbytes]}}).encode()
    header += b" " * (-(len(header) + 8) % 64)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    view = map_tensors(tmp_path)["w"]
    array = place([view], jax.ShapeDtypeStruct(view.shape, view.dtype))
    assert array.unsafe_buffer_pointer() == view.ctypes.data
    del view  # the array keeps the mapping
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    np.testing.assert_array_equal(np.asarray(added), values + 1)
    assert file.read_bytes()[-values.nbytes :] == values.tobytes()


@pytest.mark.parametrize(("leaf", "most"), [("", 2), (".codes", 1)])
def test_two_dense_weights_are_placed_at_once_and_forms_one_after_the_other(monkeypatch, leaf, most):
    here, now, counts, both = threading.Lock(), [], [], threading.Barrier(2)

    def watched(sources, target, expansion):
        with here:
            now.append(target)
            counts.append(len(now))
        if not leaf:
            both.wait(timeout=60)  # passes when there are two
        with here:
            now.pop()
        return target

    monkeypatch.setattr(placement, "place", watched)
    monkeypatch.setattr(placement, "leaves_of", lambda sources, name: sources)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {f"layers.{i}.weight{leaf}": jax.ShapeDtypeStruct((i,), "float32", sharding=device) for i in range(4)}
    placed = placement.place_all({f"layers.{i}.weight": [] for i in range(4)}, wanted, {})
    assert list(placed.items()) == list(wanted.items())
    assert max(counts) == most


@pytest.mark.parametrize("length", [0, 5, 60, -1])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, length):
    file = write_sharded(tmp_path / "hf", tensors()) / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model-00002-of-00002.safetensors is missing, truncated or damaged"):
        load(tmp_path / "hf")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    (write_sharded(tmp_path / "hf", tensors()) / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors is missing, truncated or damaged"):
        load(tmp_path / "hf")


def test_a_file_that_differs_from_the_index_is_an_error_that_names_both_sides(tmp_path):
    folder = write_sharded(tmp_path / "hf", tensors())
    safetensors.numpy.save_file({"other": np.ones(3, np.float32)}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"00001-of-00002.safetensors differs from .*embed_tokens.*not listed \['other'\]"
    ):
        load(folder)


def test_the_index_says_which_file_a_tensor_comes_from(tmp_path):
    folder = write_sharded(tmp_path / "hf", tensors())
    wanted = load(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first, second = sorted(set(index["weight_map"].values()))
    moved = next(name for name, file in index["weight_map"].items() if file == second)
    shard = safetensors.numpy.load_file(folder / first)
    more = {moved: np.ones((2, 2), np.float32), "model.layers.0.of_another": np.ones(3, np.float32)}
    safetensors.numpy.save_file(shard | more, folder / first)
    del index["weight_map"][next(iter(shard))]  # the model needs it, and a shard has it
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(folder)
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_a_head_that_the_index_leaves_out_is_read_as_any_other(tmp_path):
    folder, made = write_sharded(tmp_path / "hf", tensors()), tensors()
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    rules = [
        Rule(source=source, target=target)
        for source, target in (("model.embed_tokens.weight", "embed.weight"), ("lm_head.weight", "head.weight"))
    ]
    wanted = {rule.target: jax.ShapeDtypeStruct((300, 64), "float32") for rule in rules}
    found = open_checkpoint(folder).load(rules=rules, harmless=["model.layers.*"], targets=wanted)
    np.testing.assert_array_equal(np.asarray(found["head.weight"]), made["lm_head.weight"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_an_error_that_names_it(tmp_path, text):
    folder = write_sharded(tmp_path / "hf", tensors())
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        load(folder)


def test_weights_that_are_not_floats_are_refused_by_name(tmp_path):
    made = tensors()
    made["model.layers.0.q_proj.weight"] = made["model.layers.0.q_proj.weight"].astype(np.int8)
    with pytest.raises(ValueError, match=r"not \(a quantised checkpoint\?\): model.layers.0.q_proj.weight int8"):
        load(write_single(tmp_path / "hf", made))


def test_all_mismatches_are_found_before_anything_is_loaded(tmp_path):
    made = tensors()
    made["model.layers.0.q_proj.weight"] = made["model.layers.0.q_proj.weight"].T.copy()
    made["model.norm.weight"] = np.ones(64, np.float32)
    del made["model.layers.1.experts.2.up.weight"]
    with pytest.raises(ValueError, match="3 mismatches"):
        load(write_single(tmp_path / "hf", made))
