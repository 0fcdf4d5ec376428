"""What an opening settles where its config leaves it open: the mesh, before all that follows from it."""

from __future__ import annotations

import dataclasses

import jax

from ferrum_jax.llm import LLM
from ferrum_jax.planning.meshes.settle import MeshChoice
from tests.support import GOLDENS, SMALL

WHY = "mesh tp=1 is taken of 8 devices: the fastest"


def test_an_llm_asks_once_for_its_mesh_and_all_that_it_says_of_itself_names_it(monkeypatch):
    asked = []

    def choose(subject, devices):
        asked.append((subject.spec.architecture, subject.config.mesh, [device.id for device in devices]))
        return MeshChoice(mesh="tp=1", why=WHY)

    monkeypatch.setattr("ferrum_jax.engine.startup.chosen.choose_mesh", choose)
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(SMALL, devices=(0,)))
    assert asked == [("Qwen3ForCausalLM", None, [0])]
    assert llm.config.mesh == "tp=1" and llm.choices == (WHY,)
    assert llm.identity.environment["mesh"] == "tp=1" and llm.loaded.layout.mesh.size == 1


def test_the_cpu_takes_one_device_and_says_nothing():
    llm = LLM(str(GOLDENS / "encoders" / "bert"), max_num_batched_tokens=128, max_model_len=16)
    assert (llm.config.mesh, llm.choices) == ("tp=1", ()) and jax.default_backend() == "cpu"
