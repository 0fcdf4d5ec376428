"""LLM from a hub's model, with fields as keywords; and what process 0 lets the others open."""

from __future__ import annotations

import dataclasses

import pytest

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.llm import LLM
from ferrum_jax.startup import open as opening
from ferrum_jax.startup.open import config_of, tell_processes
from tests.checkpoints.hub_server import local_hub
from tests.support import INVARIANT, SMALL, small_llm

FIELDS = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(EngineConfig)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with local_hub(tmp_path, monkeypatch) as hub:
        yield hub


def test_a_model_of_the_hub_answers_as_its_folder_does(hub):
    told: list[str] = []
    own = {name: value for name, value in FIELDS.items() if name != "mesh"}
    llm = LLM(
        "tiny/model",
        tensor_parallel_size=1,
        trust_remote_code=False,
        on_progress=lambda *what: told.append(what[0]),
        **own,
    )
    assert llm.config == dataclasses.replace(SMALL, mesh="tp=1") and "megabytes fetched" in told
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("hello there")
    assert tokenizer.decode(ids) == "hello there"
    params = SamplingParams(max_tokens=4, temperature=0.0)
    (answer,), (expected,) = (each.generate([ids], params) for each in (llm, small_llm("qwen3")))
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_field_that_there_is_not_is_refused_before_anything_is_opened():
    with pytest.raises(TypeError, match=r"LLM has no argument max_model_length \(did you mean max_model_len\?\)"):
        LLM("no-such-folder", max_model_length=5)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0.9"):
        LLM("no-such-folder", gpu_memory_utilization=0.9)


def test_a_model_without_a_tokenizer_says_so():
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        small_llm("qwen3_moe", INVARIANT).get_tokenizer()


def test_the_other_processes_are_told_the_commit_that_process_0_found(hub, monkeypatch):
    class Leading:
        leads = True

        def open(self, arguments):
            self.told = arguments

    leading = Leading()
    monkeypatch.setattr(opening, "current", lambda: leading)
    began = hub.branches["main"]
    order = tell_processes(model="tiny/model", revision=None, config=config_of(None, {"seed": 3}), bundle=None)
    hub.push(hub.commits[began])
    assert order["revision"] == leading.told["revision"] == began
    assert leading.told["config"] == EngineConfig(seed=3)
    assert tell_processes(model="tiny/model", revision=leading.told["revision"], config=None)["revision"] == began
