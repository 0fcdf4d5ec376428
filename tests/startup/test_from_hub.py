"""LLM from a hub's model, with fields as keywords; and what process 0 lets the others open.

Starts share executables: what the demo compiles is what the README's commands and the first pages begin with.
"""

import dataclasses
import json

import jax
import pytest

from ferrum_jax.config import MANY_ROWS, EngineConfig
from ferrum_jax.engine.startup import open as opening
from ferrum_jax.engine.startup.open import config_of, tell_processes
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.llm import LLM
from ferrum_jax.models.families import registry
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.runtime.buckets import FIRST_TOKENS
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.programs import others_of, programs_of
from ferrum_jax.sampling_params import SamplingParams
from tests.checkpoints.hub_server import local_hub
from tests.support import INVARIANT, ROOT, SMALL, small_llm

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


INTERACTIVE = EngineConfig(mesh="tp=1", kv_memory_bytes=1 << 28)  # of generate, serve and Python, as they settle it
BATCH = dataclasses.replace(INTERACTIVE, max_num_seqs=MANY_ROWS, invariant=True)
DEMO = Reach(num_rows=48, num_tokens=16_000, request_tokens=600)
TWO_SHORT_ROWS = Reach(num_rows=2, num_tokens=80, request_tokens=40)
ONE_ROW = Reach(num_rows=1, num_tokens=6, request_tokens=6)


def begins_with(config: EngineConfig, reach: Reach | None) -> set[str]:
    """The shapes of what a start cannot do without."""
    spec = registry.spec_of(json.loads((ROOT / "checkpoints" / "demo" / "config.json").read_text()))
    layout = lay_out(spec, config, make_mesh(config.mesh_shape, jax.devices()[:1]), reach)
    programs = programs_of(layout)
    return {programs[p].description for p in (*layout.ladder.first_parts(FIRST_TOKENS), *others_of(layout))}


@pytest.mark.parametrize("reach", [TWO_SHORT_ROWS, ONE_ROW])
def test_a_first_batch_begins_with_what_the_demo_compiled(reach):
    assert begins_with(BATCH, reach) == begins_with(BATCH, DEMO)


def test_prompts_of_a_command_begin_with_what_python_and_a_server_begin_with():
    known = dataclasses.replace(ONE_ROW, request_tokens=None)  # a command leaves the width of tables open
    assert begins_with(INTERACTIVE, known) == begins_with(INTERACTIVE, None)
    assert begins_with(dataclasses.replace(INTERACTIVE, max_num_seqs=16), None) == begins_with(INTERACTIVE, None)


def test_the_demo_runs_with_defaults():
    text = (ROOT / "scripts" / "demo").read_text()
    assert "--max-" not in text.replace("--max-tokens", ""), "other shapes would share nothing with first-batch.md"
