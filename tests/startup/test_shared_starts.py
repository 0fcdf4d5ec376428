"""Starts share executables: what the demo compiles is what the README's commands and the first pages begin with."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from ferrum_jax.config import MANY_ROWS, EngineConfig
from ferrum_jax.models import registry
from ferrum_jax.runtime.buckets import FIRST_TOKENS
from ferrum_jax.runtime.layout import lay_out
from ferrum_jax.runtime.programs import others_of, programs_of
from ferrum_jax.sharding import make_mesh
from ferrum_jax.sizes.engine_sizes import Reach
from tests.support import ROOT

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
