"""Our own folder: what is saved is restored, it appears whole or not at all, and damage is seen."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import open_checkpoint, orbax_folder, writer
from tests.checkpoints.folders import CONFIG, parameters, targets, tensors, write_single
from tests.rows import rows_beside
from tests.support import ROOT


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, parameters as bfloat16): one checkpoint for tests that only read or copy it."""
    root = tmp_path_factory.mktemp("a store, 100%25")
    params = {name: value.astype(jnp.bfloat16) for name, value in parameters(tensors()).items()}
    source = write_single(root / "hf", tensors())
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    writer.save(root / "out", params, companions=source, source_digest="abc")
    return root / "out", params


def load(folder, wanted):
    return open_checkpoint(folder).load(rules=(), harmless=(), targets=wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_saved_is_restored_in_the_asked_dtype(saved, dtype):
    folder, params = saved
    restored = load(folder, targets(dtype))
    assert list(restored) == list(params)
    for name, array in restored.items():
        assert isinstance(array, jax.Array)
        assert array.dtype == dtype
        np.testing.assert_array_equal(np.asarray(array), params[name].astype(dtype), err_msg=name)


@pytest.mark.parametrize("way", ["sub/../out", "link/../out"])
def test_a_path_with_two_dots_is_restored_and_written_as_the_file_system_reads_it(saved, tmp_path, monkeypatch, way):
    folder, params = saved
    (tmp_path / "sub").mkdir()
    shutil.copytree(folder, tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "inner").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/inner")
    if way.startswith("link"):
        (tmp_path / "out").rename(tmp_path / "elsewhere" / "out")
    monkeypatch.chdir(tmp_path)
    restored = load(way, targets("bfloat16"))
    assert all(np.array_equal(np.asarray(array), params[name]) for name, array in restored.items())
    orbax_folder.save_arrays(Path(f"{way}-arrays"), {"a": np.arange(3)})
    assert orbax_folder.restore_arrays(Path(f"{way}-arrays"), ["a"])["a"].tolist() == [0, 1, 2]


def test_the_folder_carries_its_companions_and_describes_itself(saved):
    folder, params = saved
    assert sorted(file.name for file in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "ferrum_jax.json",
        "params",
        "tokenizer.json",
    ]
    description = orbax_folder.read_description(folder)
    assert (description["format"], description["dtype"], description["source_digest"]) == (2, "bfloat16", "abc")
    assert description["parameters"]["layers.1.mlp.up"] == {"shape": [3, 5, 64], "dtype": "bfloat16"}
    assert description["parameters"].keys() == params.keys()
    assert not any(str(folder.parent).encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    opened = open_checkpoint(folder)
    assert (opened.kind, opened.config) == ("orbax", CONFIG)


def test_ten_megabytes_of_weights_take_at_most_five_percent_more_on_disk(tmp_path):
    random = np.random.default_rng(0)
    params = {
        f"layers.{i}.w": jnp.asarray(random.integers(0, 2**16, (512, 512), np.uint16)).view(jnp.bfloat16)
        for i in range(20)
    }
    writer.save(tmp_path / "out", params, companions=write_single(tmp_path / "hf", tensors()))
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    raw = sum(array.nbytes for array in params.values())
    assert sum(file.stat().st_size for file in files) <= 1.05 * raw
    assert len(files) <= 20


def test_the_demo_checkpoint_of_format_1_still_opens():
    description = orbax_folder.read_description(ROOT / "checkpoints" / "demo")
    assert description["format"] == 1
    names = [name for name, _ in orbax_folder.read_params(ROOT / "checkpoints" / "demo")]
    assert sorted(names) == sorted(description["parameters"])


def test_an_output_that_is_not_empty_is_refused_and_untouched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        writer.save(tmp_path / "out", parameters(tensors()), companions=write_single(tmp_path / "hf", tensors()))
    assert (tmp_path / "out" / "mine").read_text() == "x"


def test_an_empty_folder_is_taken_as_the_output(tmp_path):
    (tmp_path / "out").mkdir()
    writer.save(tmp_path / "out", parameters(tensors()), companions=write_single(tmp_path / "hf", tensors()))
    assert open_checkpoint(tmp_path / "out").kind == "orbax"


def test_a_save_that_fails_leaves_nothing_behind(tmp_path):
    (tmp_path / "no_config").mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        writer.save(tmp_path / "out", parameters(tensors()), companions=tmp_path / "no_config")
    assert [file.name for file in tmp_path.iterdir()] == ["no_config"]


def test_all_mismatches_with_the_model_are_in_one_error(saved):
    wanted = targets()
    wanted["norm.weight"] = wanted.pop("embedding.weight")
    wanted["layers.1.mlp.up"] = jax.ShapeDtypeStruct((3, 64, 5), "float32")
    with pytest.raises(ValueError) as error:
        load(saved[0], wanted)
    assert [line.strip() for line in str(error.value).splitlines()[1:]] == [
        "embedding.weight is left over: the model has no such parameter",
        "layers.1.mlp.up is [3, 5, 64]; the model wants [3, 64, 5]",
        "norm.weight is missing",
    ]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_every_file_of_the_weights_that_is_missing_or_truncated_is_named(saved, tmp_path, damage):
    files = [file.relative_to(saved[0]) for file in (saved[0] / "params").rglob("*") if file.is_file()]
    assert files
    for i, file in enumerate(files):
        shutil.copytree(saved[0], tmp_path / str(i))
        damage(tmp_path / str(i) / file)
        with pytest.raises(ValueError, match=rf"params is damaged, missing or truncated are \['.*{file.name}'\]"):
            load(tmp_path / str(i), targets())


def test_damage_inside_a_file_that_orbax_sees_is_an_error_that_names_the_folder(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "bad")
    manifest = tmp_path / "bad" / "params" / "00000" / "manifest.ocdbt"
    manifest.write_bytes(bytes(255 - byte for byte in manifest.read_bytes()))
    with pytest.raises(ValueError, match="params/00000 cannot be read"):
        load(tmp_path / "bad", targets())


@pytest.mark.parametrize(("change", "message"), rows_beside(__file__)["a description of another kind is refused"])
def test_a_description_of_another_kind_is_refused(saved, tmp_path, change, message):
    shutil.copytree(saved[0], tmp_path / "bad")
    file = tmp_path / "bad" / "ferrum_jax.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        list(orbax_folder.read_params(open_checkpoint(tmp_path / "bad").path))
