"""A Hugging Face folder becomes ours, and goes back to the very same tensors.

Conversion sums up what the cast cost, goes on after a kill and holds a group in memory at a time.
"""

import json
import math
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import convert, open_checkpoint, to_huggingface, writer
from checkpoints.folder import companion_files
from checkpoints.huggingface import map_tensors, write_tensors
from checkpoints.rules import Rule, TensorSlice
from ferrum_jax.__main__ import main
from ferrum_jax.io.files.json_files import read_json
from ferrum_jax.models.families import registry
from tests.checkpoints.folders import HARMLESS, RULES, parameters, targets, tensors, write_sharded, write_single
from tests.support import GOLDENS

ENCODER = GOLDENS / "encoders" / "bert"


def run(source: Path, out: Path, dtype: str | None = None):
    return convert(source, out, rules=RULES, harmless=HARMLESS, targets=targets(), dtype=dtype)


def interrupted(source: Path, out: Path, method: str, *, writes: int = 0) -> None:
    """A conversion to bfloat16, group by group, killed in a method of its writer behind so many of its calls."""
    own, left = getattr(writer.Writer, method), [None] * writes

    def killed(self, *given, **named):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return own(self, *given, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.Writer, method, killed)
        run(source, out, "bfloat16")


def assert_same(one: Path, other: Path) -> None:
    """The same tensors by name, dtype and bits, and the same files beside them."""
    wanted, found = map_tensors(one), map_tensors(other)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name
    assert companion_files(other) == companion_files(one)
    assert all((other / name).read_bytes() == (one / name).read_bytes() for name in companion_files(one))


def test_a_converted_checkpoint_holds_the_cast_weights(tmp_path):
    made = tensors()
    summary = run(write_single(tmp_path / "hf", made), tmp_path / "out", "bfloat16")
    params = open_checkpoint(tmp_path / "out").load(rules=(), harmless=(), targets=targets("bfloat16"))
    expected = parameters(made)
    error = max(np.abs(v.astype(jnp.bfloat16).astype(np.float64) - v).max() for v in expected.values())
    for name, value in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value.astype(jnp.bfloat16))
    assert (summary.tensors, summary.parameters, summary.dtype) == (6, 4, "bfloat16")
    assert summary.bytes == 2 * sum(value.size for value in expected.values())
    assert summary.max_cast_error == error > 0


def test_without_a_dtype_nothing_is_cast_and_the_source_is_recognised(tmp_path):
    made = tensors()
    one = run(write_single(tmp_path / "one", made), tmp_path / "out1")
    two = run(write_sharded(tmp_path / "two", made), tmp_path / "out2")
    other = run(write_single(tmp_path / "three", tensors(seed=1)), tmp_path / "out3")
    assert (one.max_cast_error, one.dtype) == (0.0, "float32")
    assert one.source_digest == two.source_digest != other.source_digest


def test_a_weight_beyond_the_range_of_the_dtype_is_refused_and_nothing_is_written(tmp_path):
    made = tensors()
    made["model.layers.0.q_proj.weight"][3, 4] = 1e6
    with pytest.raises(ValueError, match=r"layers.0.attention.q.weight has weights beyond the range of float16"):
        run(write_single(tmp_path / "hf", made), tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_not_empty_is_refused_before_the_weights_are_read(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        run(tmp_path / "nowhere", tmp_path / "out")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss_mxfp4", "encoders/bert", "encoders/bert_masked"])
def test_a_checkpoint_goes_back_to_the_same_tensors_config_and_tokenizer(name, tmp_path, capsys):
    """Half precision, stacked experts in several files, packed weights, and a head that the encoder leaves out."""
    assert main(["convert", "--hf", str(GOLDENS / name), "--out", str(tmp_path / "ours")]) == 0
    (tmp_path / f".back.{os.getpid()}.tmp").mkdir()  # of a process that was killed
    assert main(["convert", "--orbax", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "back")]) == 0
    assert "tensors" in capsys.readouterr().out
    assert_same(GOLDENS / name, tmp_path / "back")
    load_file(tmp_path / "back" / "model.safetensors")  # as others read it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "ours"]


def test_dtypes_that_differ_stay_as_they_are_and_parts_of_tensors_are_put_together(tmp_path):
    rng = np.random.default_rng(0)
    made = {
        "qkv": rng.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
        "turned": rng.standard_normal((3, 5)).astype(np.float32),
        "ids": np.arange(7),
    }
    rules = (
        Rule(source="qkv", target="q", part=TensorSlice(stop=2)),
        Rule(source="qkv", target="k", part=TensorSlice(start=2)),
        Rule(source="turned", target="o", part=TensorSlice(transposed=True)),
    )
    shapes = {"q": (2, 4), "k": (4, 4), "o": (5, 3)}
    wanted = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    source = write_single(tmp_path / "hf", made)
    summary = convert(source, tmp_path / "ours", rules=rules, harmless=("ids",), targets=wanted)
    assert summary.cast_errors == () and summary.dtype == "bfloat16"
    assert to_huggingface(tmp_path / "ours", tmp_path / "back", rules=rules) == 3
    assert_same(source, tmp_path / "back")


def test_several_files_are_written_with_an_index_where_one_would_be_too_large(tmp_path, monkeypatch):
    run(write_single(tmp_path / "hf", tensors()), tmp_path / "ours")
    monkeypatch.setattr("checkpoints.huggingface.SHARD_BYTES", 1000)
    to_huggingface(tmp_path / "ours", tmp_path / "back", rules=RULES)
    index = read_json(tmp_path / "back" / "model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) > 1
    assert_same(tmp_path / "hf", tmp_path / "back")


def test_a_killed_conversion_goes_on_and_gives_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP_BYTES", 1)
    source = write_single(tmp_path / "hf", tensors())
    interrupted(source, tmp_path / "out", "write", writes=1)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.part").exists()
    summary, whole = run(source, tmp_path / "out", "bfloat16"), run(source, tmp_path / "whole", "bfloat16")
    assert (summary.num_resumed, whole.num_resumed) == (1, 0)
    assert summary.cast_errors == whole.cast_errors and summary.max_cast_error > 0
    one, other = (
        open_checkpoint(tmp_path / n).load(rules=(), harmless=(), targets=targets()) for n in ("out", "whole")
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "whole"]


def test_a_full_disk_is_refused_and_an_interrupted_conversions_work_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP_BYTES", 1)
    source = write_single(tmp_path / "hf", tensors())
    run(source, tmp_path / "whole", "bfloat16")
    free = [0]
    monkeypatch.setattr("checkpoints.folder.shutil.disk_usage", lambda folder: types.SimpleNamespace(free=free[0]))
    with pytest.raises(ValueError, match=rf"{tmp_path} has 0 bytes free, and .* are to be written; make room or name"):
        run(source, tmp_path / "out", "bfloat16")
    with pytest.raises(ValueError, match="make room or name another output"):
        to_huggingface(tmp_path / "whole", tmp_path / "back", rules=RULES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "whole"]
    free[0] = sum(math.prod(target.shape) * 2 for target in targets().values())
    interrupted(source, tmp_path / "out", "write", writes=1)
    free[0] -= 1
    assert run(source, tmp_path / "out", "bfloat16").num_resumed == 1


def test_another_source_or_dtype_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP_BYTES", 1)
    source = write_single(tmp_path / "hf", tensors())
    interrupted(source, tmp_path / "out", "finish")
    assert run(source, tmp_path / "out", "float16").num_resumed == 0
    assert read_json(tmp_path / "out" / "ferrum_jax.json")["dtype"] == "float16"


def test_what_is_in_memory_at_once_is_the_largest_parameter_or_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "GROUP_BYTES", 3000)
    sizes = []
    write = writer.Writer.write

    def recorded(self, group, params, record):
        sizes.append([array.nbytes for array in params.values()])
        write(self, group, params, record)

    monkeypatch.setattr(writer.Writer, "write", recorded)
    run(write_single(tmp_path / "hf", tensors()), tmp_path / "out")
    largest = max(size for group in sizes for size in group)
    assert len(sizes) > 1 and max(map(sum, sizes)) == largest > 3000


def test_the_error_of_a_cast_is_told_for_each_class_of_parameters(tmp_path, capsys):
    assert main(["convert", "--hf", str(ENCODER), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    shown = capsys.readouterr().out
    assert "what the cast changed" in shown and "layers.*.attention_norm.weight" in shown
    weights = registry.weights_of(json.loads((ENCODER / "config.json").read_text()))
    summary = convert(ENCODER, tmp_path / "again", **weights._asdict(), dtype="bfloat16")
    table = {error.parameters: error for error in summary.cast_errors}
    wide = map_tensors(ENCODER)["embeddings.word_embeddings.weight"].astype(np.float64)
    off = wide.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64) - wide
    assert table["words.weight"].largest == np.abs(off).max()
    assert table["words.weight"].relative_rms == pytest.approx(np.sqrt(np.sum(off**2) / np.sum(wide**2)))


@pytest.mark.parametrize(
    "flags", [["--hf", "a"], ["--orbax", "a"], ["--orbax", "a", "--to-hf", "b", "--dtype", "float32"]]
)
def test_a_conversion_that_lacks_its_output_is_wrong_usage(flags, capsys):
    assert main(["convert", *flags]) == 2
    assert "the folder to write" in capsys.readouterr().err


def test_safetensors_that_are_written_are_as_the_library_writes_them(tmp_path):
    made = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "none": np.zeros((0, 4), np.float16)}
    save_file(made, tmp_path / "theirs.safetensors")
    found = load_file(tmp_path / "theirs.safetensors")
    views = write_tensors(tmp_path / "ours.safetensors", {n: (a.shape, a.dtype) for n, a in made.items()})
    for name, array in made.items():
        views[name][...] = array
    del views
    ours = load_file(tmp_path / "ours.safetensors")
    assert all(np.array_equal(ours[name], found[name]) and ours[name].dtype == found[name].dtype for name in made)
