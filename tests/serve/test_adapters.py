"""A request names an adapter as its model."""

import dataclasses
import hashlib
import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.app import adapter_routes
from ferrum_jax.serve.folders_below import folder_below
from ferrum_jax.serve.http.api_keys import ApiKey
from ferrum_jax.serve.http.settings import ServerSettings
from tests.rows import rows_beside
from tests.serve.running import running
from tests.support import GOLDENS, INVARIANT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LoRA of the qwen3 golden's first output projection."""
    found = tmp_path_factory.mktemp("poet")
    config = json.loads((GOLDENS / "qwen3" / "config.json").read_text())
    width, rng = config["num_attention_heads"] * config["head_dim"], np.random.default_rng(0)
    shapes = {"A": (4, width), "B": (config["hidden_size"], 4)}
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    save_file(
        {f"{name}.lora_{x}.weight": rng.standard_normal(shape).astype(np.float32) for x, shape in shapes.items()},
        found / "adapter_model.safetensors",
    )
    (found / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return found


@pytest.mark.slow
def test_a_model_s_name_may_be_an_adapter_s(folder):
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(INVARIANT, max_adapters=2, max_adapter_rank=4))
    llm.load_adapter("poet", folder)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    wanted = llm.generate([[7, 8, 9]] * 2, params, adapter=[None, "poet"])
    assert wanted[0].token_ids != wanted[1].token_ids
    body = {"prompt": [7, 8, 9], "max_tokens": 12, "temperature": 0}
    with running(ServerSettings(names=("small",)), inner=llm) as server:
        for name, output in zip(("small", "poet"), wanted, strict=True):
            status, _, answer = server.ask("/v1/completions", {**body, "model": name})
            assert (status, answer["model"], answer["choices"][0]["text"]) == (200, name, output.text)
        status, _, answer = server.ask("/v1/completions", {**body, "model": "clerk"})
        assert status == 404 and "this server has 'small', 'poet'" in answer["error"]["message"]
        listed = server.ask("/v1/models")[2]["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [("small", None), ("poet", "small")]
        assert server.ask("/v1/embeddings", {"input": "x", "model": "poet"})[0] == 404


def test_an_adapter_is_not_called_as_the_model_is():
    with pytest.raises(ValueError, match="both called 'small'"):
        ServerSettings(names=("small",)).require_apart(["small"])


def test_an_adapter_root_is_a_folder(tmp_path):
    with pytest.raises(ValueError, match="which is no folder"):
        ServerSettings(adapter_root=str(tmp_path / "missing"))


@pytest.fixture
def root(folder, tmp_path):
    """A root with one adapter, and what must not be reached from it."""
    found, outside = tmp_path / "root", tmp_path / "outside"
    shutil.copytree(folder, found / "poets" / "poet")
    shutil.copytree(folder, outside)
    (found / "link").symlink_to(outside, target_is_directory=True)
    (found / "inner").symlink_to(found / "poets" / "poet", target_is_directory=True)
    (found / "halved").mkdir()
    shutil.copy(folder / "adapter_config.json", found / "halved")
    (found / "halved" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (found / "piped" / "params").mkdir(parents=True)
    os.mkfifo(found / "piped" / "params" / "pipe")
    (found / "deep" / "params").mkdir(parents=True)
    (found / "deep" / "params" / "d").symlink_to(outside, target_is_directory=True)
    return found


def test_what_lies_below_the_root_is_found_and_links_inside_it_are_followed(root):
    wanted = (root / "poets" / "poet").resolve()
    for path in ("poets/poet", "./poets//poet/", str(root / "poets" / "poet"), "inner"):
        assert folder_below(root, path) == wanted


@pytest.mark.parametrize(("path", "why"), rows_beside(__file__)["what does not lie below the root is refused"])
def test_what_does_not_lie_below_the_root_is_refused(root, path, why):
    with pytest.raises(ValueError, match=why):
        folder_below(root, path.format(outside=root.parent / "outside"))


def test_half_of_a_surrogate_pair_in_a_path_is_refused_by_its_field():
    with pytest.raises(FieldError, match=r"lora_path is '\\ud800', which holds half of a surrogate pair") as refused:
        adapter_routes._text({"lora_path": "\ud800"}, "lora_path")
    assert refused.value.param == "lora_path"


@pytest.mark.slow
def test_adapters_come_and_go_over_http_with_an_admin_key(folder, root):
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(INVARIANT, max_adapters=1, max_adapter_rank=4))
    keys, admins = (read_key("user-key-1"), read_key("user-key-2")), (read_key("admin-key"),)
    settings = ServerSettings(names=("small",), keys=keys, admin_keys=admins, adapter_root=str(root))
    user, admin = {"Authorization": "Bearer user-key-1"}, {"Authorization": "Bearer admin-key"}
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"prompt": [7, 8, 9], "max_tokens": 12, "temperature": 0, "model": "poet"}
    poet = {"lora_name": "poet", "lora_path": "poets/poet"}
    with running(settings, inner=llm) as server:
        for headers in ({}, user):
            assert server.ask(load, poet, **headers)[0] == 401
        assert server.ask("/v1/completions", body, **user)[0] == 404
        assert server.ask(load, poet, **admin)[0] == 200
        status, _, answer = server.ask("/v1/completions", body, **user)
        assert (status, answer["model"]) == (200, "poet")
        (wanted,) = llm.generate([[7, 8, 9]], SamplingParams(max_tokens=12, temperature=0.0), adapter="poet")
        assert answer["choices"][0]["text"] == wanted.text
        assert [model["id"] for model in server.ask("/v1/models", **user)[2]["data"]] == ["small", "poet"]
        wrong = {
            "loaded already": poet,
            "must not go up": {**poet, "lora_name": "b", "lora_path": "../outside"},
            "outside --adapter-root": {**poet, "lora_name": "b", "lora_path": "link"},
            "the model's name": {**poet, "lora_name": "small"},
            "must be a text": {"lora_name": 7, "lora_path": "x"},
            "is not known": {**poet, "rank": 3},
            "lora_path is '\\ud800', which holds half": {**poet, "lora_path": "\ud800"},
            "can be printed": {**poet, "lora_name": "a\nb"},
            "no such folder": {**poet, "lora_name": "b", "lora_path": "poets/nobody"},
            "has no adapter_config.json": {**poet, "lora_name": "b", "lora_path": "poets"},
        }
        for why, asked in wrong.items():
            status, _, answer = server.ask(load, asked, **admin)
            assert status == 400 and why in answer["error"]["message"], (why, answer)
        assert server.ask(load, {**poet, "load_inplace": True, "base_model_name": "small"}, **admin)[0] == 200
        assert server.ask(load, {**poet, "base_model_name": "other"}, **admin)[0] == 404
        assert server.ask(unload, {"lora_name": "nobody"}, **admin)[0] == 404
        assert server.ask(unload, {"lora_name": "poet"}, **user)[0] == 401
        assert server.ask(unload, {"lora_name": "poet", "lora_int_id": 1}, **admin)[0] == 200
        assert server.ask("/v1/completions", body, **user)[0] == 404
        assert server.ask("/v1/completions", {**body, "model": "small"}, **user)[0] == 200


def read_key(secret: str) -> ApiKey:
    return ApiKey(digest=hashlib.sha256(secret.encode()).digest(), name=secret, salt="")


def test_without_a_root_nothing_is_loaded_over_http():
    with running() as server:
        status, _, answer = server.ask("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"})
        assert status == 404 and "--adapter-root" in answer["error"]["message"]
