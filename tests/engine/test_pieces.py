"""Forwards in pieces: one executable for each kind of layer, and the tokens of whole forwards."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.llm import LLM
from ferrum_jax.models.families import registry
from ferrum_jax.runtime import programs
from ferrum_jax.runtime.compile.pieces import PiecedExecutable
from tests.support import GOLDENS, INVARIANT, SMALL, run, small_llm

PROMPTS = [[7] * 20, [9], [3, 4, 5, 6] * 8]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
# Layers of several kinds: windows, states, experts, latents, lent keys and inputs of their own.
OTHERS = ["gemma3", "gemma4", "qwen3_next", "granitemoehybrid", "deepseek_v3", "gpt_oss_mxfp4", "nemotron_h", "llama4"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", *OTHERS])
def test_tokens_in_pieces_are_those_of_the_whole(family, monkeypatch):
    whole = small_llm(family)
    monkeypatch.setattr(programs, "MIN_PIECE_BYTES", 0)
    pieced = LLM(str(GOLDENS / family), SMALL)
    layers = registry.abstract_model(pieced.spec).layers
    kinds = {registry.unbind(layer)[0] for layer in layers}
    for executable in pieced.loaded.executables.forwards.values():
        assert isinstance(executable, PiecedExecutable) and len(executable.pieces) >= len(kinds) + 2
        assert len(executable.plan.steps) == len(layers) + 2, "nothing stands between layers"
        assert len(executable.pieces) == len(kinds) + 2 or family == "gpt_oss_mxfp4"
    own, theirs = run(pieced, PROMPTS, GREEDY), run(whole, PROMPTS, GREEDY)
    assert [output.token_ids for output in own] == [output.token_ids for output in theirs]


def test_in_invariant_mode_bits_in_pieces_are_those_of_the_whole(monkeypatch):
    whole = small_llm("qwen3", INVARIANT)
    monkeypatch.setattr(programs, "MIN_PIECE_BYTES", 0)
    pieced = LLM(str(GOLDENS / "qwen3"), INVARIANT)
    assert all(isinstance(each, PiecedExecutable) for each in pieced.loaded.executables.forwards.values())
    own, theirs = run(pieced, PROMPTS, GREEDY), run(whole, PROMPTS, GREEDY)
    assert [output.outputs[0].logprobs for output in own] == [output.outputs[0].logprobs for output in theirs]


def test_a_piece_has_layers_enough_to_take_its_time(monkeypatch):
    layout = small_llm("qwen3").loaded.layout
    targets = {f"layers.{i}.w": jax.ShapeDtypeStruct((16 << 20,), "float32") for i in range(28)}  # 64 MiB each
    layers = dataclasses.replace(layout.settled.spec, num_hidden_layers=28)
    large = SimpleNamespace(mesh=layout.mesh, decoder_targets=targets, spec=layers)
    sizes = {b.num_tokens: programs._layers_together(large, b) for b in layout.ladder.buckets}
    assert sizes[1] == 3 and sizes[16] == 1
    monkeypatch.setattr(programs, "MIN_PIECE_BYTES", 10 * 64 << 20)
    assert programs._layers_together(large, layout.ladder.buckets[0]) is None, "three pieces save too little"


def test_small_layers_and_meshes_stay_whole(monkeypatch):
    layout = small_llm("qwen3").loaded.layout
    assert not any(program.pieces_at for program in programs.programs_of(layout).values())
    monkeypatch.setattr(programs, "MIN_PIECE_BYTES", 0)
    cut = {part for part, program in programs.programs_of(layout).items() if program.pieces_at}
    assert cut == set(layout.ladder.buckets)
    mesh = jax.sharding.Mesh(layout.mesh.devices.repeat(2).reshape(1, 2), layout.mesh.axis_names)
    there = dataclasses.replace(layout, mesh=mesh)
    assert programs._layers_together(there, layout.ladder.buckets[0]) is None
