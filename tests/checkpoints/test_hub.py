"""Models of a hub: a commit's safetensors and the files beside them are fetched, nothing else, and only for ids."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from checkpoints import open_checkpoint
from checkpoints.hub import commit_of, model_folder
from ferrum_jax.io.paths import is_hub_id
from tests.checkpoints.folders import tensors, write_sharded
from tests.checkpoints.hub_server import local_hub, point_at
from tests.support import GOLDENS, ROOT, written_by

MODEL = "tiny/model"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with local_hub(tmp_path, monkeypatch) as hub:
        yield hub


def copy_of(family: str, folder: Path) -> Path:
    return Path(shutil.copytree(GOLDENS / family, folder))


def test_only_safetensors_are_fetched(hub):
    folder = hub.commits[hub.branches["main"]]
    for name in ("pytorch_model.bin", "model.pth", "consolidated.safetensors", "training_args.bin", "modeling_own.py"):
        (folder / name).write_bytes(b"must not be fetched")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"nor this")
    checkpoint = open_checkpoint(MODEL)
    assert checkpoint.kind == "huggingface" and checkpoint.path.name == hub.branches["main"]
    assert checkpoint.config == json.loads((folder / "config.json").read_text())
    found = {path.relative_to(checkpoint.path).as_posix() for path in checkpoint.path.rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found
    assert not found & {"pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "golden.npz"}
    assert {name.partition("/")[2] for name in hub.fetched if name} == found


def test_files_of_an_index_and_of_sentence_transformers_are_fetched(hub, tmp_path):
    hub.push(write_sharded(tmp_path / "sharded", tensors()), "sharded")
    hub.push(copy_of("encoders/bert", tmp_path / "bert"), "vectors")
    assert len(list(Path(model_folder(MODEL, "sharded")).glob("*.safetensors"))) == 2
    found = Path(model_folder(MODEL, "vectors", weights=False))
    assert (found / "1_Pooling" / "config.json").is_file() and not (found / "model.safetensors").exists()


def test_an_index_that_names_what_is_no_safetensors_is_refused(hub, tmp_path):
    folder = write_sharded(tmp_path / "sharded", tensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    hub.push(folder)
    with pytest.raises(ValueError, match=r"names pytorch_model.bin; only safetensors are fetched"):
        model_folder(MODEL)
    assert not any(name.endswith(".bin") for name in hub.fetched)


def test_a_model_that_has_pickles_alone_is_refused(hub):
    folder = hub.commits[hub.branches["main"]]
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model.safetensors or model.safetensors.index.json at commit"):
        model_folder(MODEL)


def test_a_revision_is_a_branch_a_tag_or_a_commit_and_stays_what_it_was(hub, tmp_path):
    first = hub.branches["main"]
    second = hub.push(copy_of("llama", tmp_path / "moved"))
    assert commit_of(MODEL) == commit_of(MODEL, "main") == second
    assert Path(model_folder(MODEL, first)).name == first
    assert open_checkpoint(MODEL, first).config["architectures"] == ["Qwen3ForCausalLM"]
    with pytest.raises(ValueError, match=r"has no revision 'v9': name a branch, tag or commit"):
        commit_of(MODEL, "v9")


def test_a_commit_in_the_cache_is_opened_without_any_request(hub):
    commit = hub.branches["main"]
    model_folder(MODEL)
    hub.asked.clear()
    assert commit_of(MODEL, commit) == commit
    assert Path(model_folder(MODEL, commit)).name == commit
    assert hub.asked == []


def test_without_a_connection_the_cache_is_used_and_what_it_lacks_is_named(hub, monkeypatch):
    commit = hub.branches["main"]
    folder = model_folder(MODEL)
    point_at("http://127.0.0.1:1", monkeypatch)
    assert (commit_of(MODEL), model_folder(MODEL)) == (commit, folder)
    with pytest.raises(ValueError, match=r"tiny/other is not a folder here, and what is needed is not in the cache"):
        model_folder("tiny/other")


def test_paths_are_never_taken_for_ids_and_ask_nothing_of_the_network(hub):
    names = ["checkpoints/demo", "./a/b", "../a", "/a/b", "a/b/c", "a/b/", "gs://a/b", "a", "~/a", ".a/b", "", "a--b/c"]
    assert not any(is_hub_id(name) for name in names) and is_hub_id("Qwen/Qwen3-0.6B")
    for name in names[:-2]:
        assert model_folder(name) == name
        with pytest.raises(ValueError, match="revisions are of a hub's models"):
            model_folder(name, "main")
    shutil.copytree(GOLDENS / "qwen3", MODEL)  # a path that is there wins
    assert open_checkpoint(MODEL).path == Path(MODEL)
    with pytest.raises(ValueError, match=r"is not a folder; name a Hugging Face folder, .* or a model of the hub"):
        open_checkpoint("./no/model")
    assert hub.asked == []


def test_a_mistyped_path_is_neither_a_folder_nor_a_model_and_the_error_says_both(hub):
    with pytest.raises(
        ValueError, match=r"my/model is not a folder here, and http.* has no model of this name that you"
    ):
        open_checkpoint("my/model")


def test_progress_is_told_in_bytes(hub):
    told: list[tuple[str, int, int]] = []
    weights = hub.commits[hub.branches["main"]] / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(3 * 10**6))
    model_folder(MODEL, on_progress=lambda *what: told.append(what))
    assert told[-1][0] == "megabytes fetched" and told[-1][1] == told[-1][2] >= 3


def run(hub, home, **variables: str) -> str:
    """The folder that another process finds, for the library reads its variables when it is imported."""
    program = f"from checkpoints.hub import model_folder; print(model_folder({MODEL!r}))"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    return written_by([sys.executable, "-c", program], cwd=Path(), env=clean | own).strip()


def test_offline_mode_opens_what_a_filled_cache_has(hub, tmp_path):
    folder = model_folder(MODEL)
    hub.asked.clear()
    assert run(hub, tmp_path / "home", HF_HUB_OFFLINE="1") == folder
    assert hub.asked == []


def test_a_token_opens_what_is_private_and_is_sent_to_the_hub_alone(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub.token = "hf_secret"
    with pytest.raises(ValueError, match="or set HF_TOKEN for a private one"):
        model_folder(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    model_folder(MODEL)
    assert {bearer for _, path, bearer in hub.asked if "/blob/" in path} == {None}


@pytest.mark.slow
def test_home_endpoint_and_token_are_the_librarys_own_variables(hub, tmp_path):
    hub.token = "hf_secret"
    folder = Path(run(hub, tmp_path / "other", HF_TOKEN="hf_secret"))
    assert folder.is_relative_to(tmp_path / "other") and (folder / "model.safetensors").is_file()
