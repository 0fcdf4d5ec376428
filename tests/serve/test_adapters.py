"""A request names an adapter as its model."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.serve.http.settings import ServerSettings
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
    with running(ServerSettings(names=("small",), adapters=("poet",)), inner=llm) as server:
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
        ServerSettings(names=("small",), adapters=("small",))
