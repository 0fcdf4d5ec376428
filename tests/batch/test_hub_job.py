"""A job with a hub's model goes on with the commit that it began with, wherever the branch is by then."""

import json
import shutil
from pathlib import Path

import pytest

from ferrum_jax.__main__ import main
from ferrum_jax.batch.journal.job_identity import JobIdentity, JobRefused, begun_with
from ferrum_jax.batch.journal.keeper import JobOptions
from ferrum_jax.batch.ray import RayLLM
from ferrum_jax.io.files.store import open_store
from ferrum_jax.llm import LLM
from tests.checkpoints.hub_server import local_hub
from tests.support import COMPILED, GOLDENS, raising

ENGINE = "--max-num-seqs 4 --max-num-batched-tokens 16 --max-model-len 256 --num-blocks 80 --block-size 16"
ROW = {"custom_id": "a", "prompt_token_ids": [5, 6, 7], "max_tokens": 3, "model": "tiny/model"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with local_hub(tmp_path, monkeypatch) as hub:
        yield hub


def batch(tmp_path, *more: str) -> int:
    (tmp_path / "in.jsonl").write_text(json.dumps(ROW) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    engine = [*ENGINE.split(), "--no-invariant", "--compilation-cache-dir", str(COMPILED)]
    return main(["batch", "--model", "tiny/model", *files, *engine, *more])


@pytest.mark.slow
def test_a_branch_that_moves_between_start_and_resume_does_not_move_the_job(hub, tmp_path, monkeypatch, capsys):
    began, out = hub.branches["main"], tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(LLM, "run", raising(KeyboardInterrupt))
        assert batch(tmp_path) == 130
    moved = hub.push(Path(shutil.copytree(GOLDENS / "llama", tmp_path / "moved")))
    assert batch(tmp_path, "--revision", moved) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f'commit "{began}", now "{moved}"' in said
    hub.asked.clear()
    assert batch(tmp_path) == 0
    assert not [path for _, path, _ in hub.asked if "/revision/" in path]
    line = json.loads(out.read_text())
    assert line["error"] is None and line["response"]["body"]["model"] == "tiny/model"
    assert json.loads((tmp_path / "out.jsonl.report.json").read_text())["identity"]["commit"] == began
    assert batch(tmp_path, "--new-run", "--revision", "main", "--plan") == 0


def identity(tmp_path) -> JobIdentity:
    record = {"created": 0, "settings": {}}
    return JobIdentity(open_store(str(tmp_path / "job")), "out", record, JobOptions(), lambda text: None)


def test_a_job_records_its_commit_once_and_refuses_another_model_or_commit(tmp_path):
    commits = {None: "a" * 40, "main": "a" * 40, "v2": "b" * 40}
    job, model = identity(tmp_path), "tiny/model"
    assert begun_with(open_store(str(tmp_path / "job")), model, None) is None
    assert job.pin(model, "main", commits.__getitem__) == "a" * 40
    commits["main"] = commits[None] = "c" * 40
    again = identity(tmp_path)
    assert again.pin(model, "main", commits.__getitem__) == again.pin(model, None, commits.__getitem__) == "a" * 40
    assert again.pin(model, "a" * 40, lambda revision: revision) == "a" * 40
    assert begun_with(open_store(str(tmp_path / "job")), model, None) == "a" * 40
    with pytest.raises(JobRefused, match=f'commit "{"a" * 40}", now "{"b" * 40}"'):
        again.pin(model, "v2", commits.__getitem__)
    with pytest.raises(JobRefused, match='hub model "tiny/model", now "other/model"'):
        again.pin("other/model", None, commits.__getitem__)
    assert identity(tmp_path / "path").pin("./model", None, lambda revision: None) is None


def test_actors_on_ray_load_the_commit_of_the_job(hub, tmp_path):
    class Start:
        identity = identity(tmp_path)
        commit_of = staticmethod(lambda model, revision: hub.branches["main"])

    options = {"num_actors": 1, "rows_at_once": 1, "window_rows": 1, "actor_options": {}}
    llm = RayLLM(lambda revision: revision, hub_model="tiny/model", **options)
    assert llm.started(Start())._make_llm() == hub.branches["main"]
