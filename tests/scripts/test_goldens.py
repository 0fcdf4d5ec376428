"""What makes goldens: it refuses what it does not know, and draws the same weights everywhere."""

import hashlib
import json
import threading

import numpy as np
import pytest
from safetensors import safe_open

from scripts.goldens import weights
from scripts.goldens.command import run
from scripts.goldens.recipe import folded, write_recipe
from tests.rows import rows_beside
from tests.support import GOLDENS

TENSORS = rows_beside(__file__)["tensors"]


@pytest.fixture
def golden(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "CACHE", tmp_path / "cache")
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_recipe(folder / "model.safetensors.json", 7, TENSORS)
    return folder


def test_a_recipe_draws_the_same_bits_everywhere(golden):
    recipe = golden / "model.safetensors.json"
    assert len(recipe.read_text().splitlines()) == len(TENSORS) - 3 + 2, "tensors that differ in numbers share a line"
    assert weights.recipe_of(recipe) == TENSORS
    found = weights.tensors_of(recipe)
    digest = hashlib.sha256(b"".join(found[name].tobytes() for name in sorted(found)))
    assert digest.hexdigest()[:16] == "3cfc314ffaf1cc8d"
    np.testing.assert_array_equal(found["tied"], found["layers.0.experts.1.w"].astype(np.float32))
    assert sorted(found["order"].tolist()) == [0] * 32 + [1] * 32 != found["order"].tolist()
    nibbles = found["codes"].view(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    assert nibbles.min() == 6 and nibbles.max() == 9


def test_the_laws_have_the_moments_they_name():
    drawn = weights.Draw(0, "w", 40_000)
    normal, uniform = drawn.normal(1.0, 0.2), drawn.uniform(-4.0, 1.0)
    assert abs(normal.mean() - 1) < 0.005 and abs(normal.std() - 0.2) < 0.002
    assert -4 <= uniform.min() < -3.99 and 0.99 < uniform.max() < 1
    assert set(drawn.integers(122, 124).tolist()) == {122, 123, 124}


def test_names_fold_only_where_all_numbers_stand_with_all():
    same = {"dtype": "float32", "shape": [1], "values": [0]}
    assert folded({"a.0.b.1.c": same, "a.1.b.0.c": same}) == [("a.0.b.1.c", same), ("a.1.b.0.c", same)]


def test_processes_that_make_a_golden_at_once_share_one_whole_folder(golden):
    found, start = [], threading.Barrier(4)

    def use() -> None:
        start.wait()
        found.append(weights.made(golden))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (folder,) = set(found)
    assert folder.name == "small" and len(found) == 4
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in weights.CACHE.iterdir()] == [folder.parent.name], "nothing half made is left"
    with safe_open(folder / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(TENSORS) and file.get_tensor("shape").tolist() == [64, 32]
    (golden / "config.json").write_text('{"a": 1}')
    assert json.loads((weights.made(golden) / "config.json").read_text()) == {"a": 1} and folder.exists()


def test_the_path_to_a_golden_leads_to_its_weights(golden):
    folders = weights.Goldens(golden.parent)
    assert folders / "small" == weights.made(golden)
    assert folders / "small/config.json" == golden / "config.json" and isinstance(folders / "missing", type(golden))
    assert (GOLDENS / "quantised" / "w8a8" / "model.safetensors").exists()


def test_an_unknown_name_is_refused_before_a_folder_is_touched(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "notes" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    monkeypatch.setattr("sys.argv", ["make_goldens", "llama", "notes", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run(None, ["llama", "qwen2"], "", lambda name, folder: None)
    assert ended.value.code == 2
    assert "nothing is called ['notes']; there are ['llama', 'qwen2']" in capsys.readouterr().err
    assert kept.read_text() == "mine" and not (tmp_path / "llama").exists()
