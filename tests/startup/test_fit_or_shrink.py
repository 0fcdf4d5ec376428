"""Starts that fail: pools that do not fit are made smaller, once; weights that fail end what compiles beside them.

What an opening settles where its config leaves it open: the mesh, before all that follows from it.
"""

import dataclasses
import threading
import types

import jax
import pytest

from checkpoints import open_checkpoint
from checkpoints.sentence import SentenceLayout
from ferrum_jax import SamplingParams
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.startup import fit_or_shrink
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.engine.startup.fit_or_shrink import Start
from ferrum_jax.engine.startup.load_encoder import load_encoder
from ferrum_jax.engine.startup.model_source import ModelSource
from ferrum_jax.inputs.sizes.mesh_shape import MeshShape
from ferrum_jax.llm import LLM
from ferrum_jax.models.sharding import make_mesh
from ferrum_jax.planning.meshes.settle import MeshChoice
from ferrum_jax.runtime import programs
from ferrum_jax.runtime.compile import compile
from ferrum_jax.runtime.compile.deferred import DeferredExecutable
from ferrum_jax.runtime.placing.fit import missing_bytes
from ferrum_jax.text.structured.reading.message_stream import NO_FORMS
from tests.support import GOLDENS, SMALL, finish, raising, small_llm

OPEN = dataclasses.replace(SMALL, num_blocks=None, compilation_cache_dir=None)
pytestmark = pytest.mark.usefixtures("compiles_at_start")


class Refusing:
    """A source of executables that do nothing, whose pools fail so many times for lack of memory."""

    def __init__(self, times: int):
        self.left = times

    def get(self, description, compile):
        return DeferredExecutable.made(self._fresh_pools if description.startswith("fresh pools") else None)

    def _fresh_pools(self, fill):
        if self.left:
            self.left -= 1
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 7 bytes too many\nand much more")
        return (None,) * 3, jax.ShapeDtypeStruct((5, 9), int), None, None, None


@pytest.fixture
def start(monkeypatch):
    """start(times, **config): an engine's start that fails so many times; and how often weights were read."""
    monkeypatch.setattr(programs, "are_untouched", lambda pools: False)  # so that Refusing is asked for them
    model = ModelSource.of_checkpoint(open_checkpoint(str(GOLDENS / "qwen3")))
    reads = []

    def read(*asked):
        reads.append(asked)
        return model.read(*asked)

    def run(times, **config):
        mesh = make_mesh(MeshShape(), jax.devices()[:1])
        options = dataclasses.replace(OPEN, kv_memory_bytes=None, **config)
        return Start(
            model=dataclasses.replace(model, read=read),
            config=options,
            mesh=mesh,
            executable_cache=Refusing(times),
            tokenizer=None,
            forms=NO_FORMS,
            on_progress=lambda *_: None,
        ).run(None)

    return types.SimpleNamespace(run=run, reads=reads)


def test_the_second_pool_is_three_quarters_of_the_first_and_weights_are_read_once(start):
    with pytest.warns(
        RuntimeWarning, match="does not fit .RESOURCE_EXHAUSTED: 7 bytes too many.; going on with"
    ) as told:
        loaded, engine = start.run(1)
    before, after = (int(text.split()[0]) for text in str(told[0].message).split("a KV pool of ")[1:])
    ledger = loaded.layout.ledger
    assert (before, after) == (4 * 256 // 16, ledger.num_blocks) and 0.7 < (after + 1) / (before + 1) <= 0.75
    assert engine.scheduler.metrics().clean == after
    assert len(start.reads) == 1


def test_a_second_failure_says_what_to_set(start):
    with (
        pytest.warns(RuntimeWarning, match="going on"),
        pytest.raises(
            ValueError, match=r"a KV pool of 64 blocks .* does not fit, nor does .*set kv_memory_bytes to less"
        ),
    ):
        start.run(2)


def test_a_pool_whose_size_was_named_is_not_made_smaller(start):
    with pytest.raises(ValueError, match=r"80 blocks .* lower num_blocks, or max_num_batched_tokens"):
        start.run(1, num_blocks=80)


def test_memory_that_others_take_meanwhile_is_seen_before_pools_are_made(start, monkeypatch):
    monkeypatch.setattr(
        fit_or_shrink, "missing_bytes", lambda layout, device: layout.ledger.kv_bytes // 2 * start.short
    )
    start.short = 1
    monkeypatch.setattr(fit_or_shrink.warnings, "warn", lambda text, *_, **__: setattr(start, "short", 0))
    loaded, _ = start.run(0)
    assert 0.45 < (loaded.layout.ledger.num_blocks + 1) / (64 + 1) <= 0.5


def test_missing_bytes_are_those_of_pools_and_the_largest_step_beyond_what_is_free(start):
    layout = start.run(0)[0].layout
    stats = {"bytes_limit": 10_000, "bytes_in_use": 4_000}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    needed = layout.ledger.used_bytes - layout.ledger.weights_bytes
    assert missing_bytes(layout, device) == needed - 6_000
    assert missing_bytes(layout, jax.devices()[0]) == 0


def test_a_step_without_rows_changes_nothing():
    llm = small_llm("qwen3")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    outputs = []
    for rehearsed in (False, True):
        engine = build_engine(llm.loaded, llm.config, None)
        if rehearsed:
            engine.runner.rehearse(1)
        engine.add([7, 8, 9] * 5, params)
        outputs += [output.token_ids for output in finish(engine).values()]
        assert engine.runner.num_steps == 6 - 1
    assert outputs[0] == outputs[1]


class Slow:
    """A source of executables that gives none before it is released, and counts what it was asked for."""

    def __init__(self):
        self.num_asked, self._asked, self.released = 0, threading.Event(), threading.Event()

    def get(self, description, compile):
        self.num_asked += 1
        self._asked.set()
        self.released.wait(60)
        return DeferredExecutable.made(None)

    def read(self, *_):
        self._asked.wait()
        raise ValueError("the weights are damaged")


@pytest.mark.parametrize("name", ["qwen3", "encoders/bert"])
def test_nothing_more_is_compiled_or_waited_for_once_the_weights_have_failed(name, monkeypatch):
    monkeypatch.setattr(compile.os, "cpu_count", lambda: 1)
    others = set(threading.enumerate())
    model, slow, done = ModelSource.of_checkpoint(open_checkpoint(str(GOLDENS / name))), Slow(), []
    mesh = make_mesh(MeshShape(), jax.devices()[:1])

    def on_progress(what, so_far, total):
        done.append(total)

    with pytest.raises(ValueError, match="the weights are damaged"):
        if name == "encoders/bert":
            load_encoder(model.spec, slow.read, EngineConfig(), mesh, SentenceLayout(), slow, on_progress)
        else:
            Start(
                model=dataclasses.replace(model, read=slow.read),
                config=OPEN,
                mesh=mesh,
                executable_cache=slow,
                tokenizer=None,
                forms=NO_FORMS,
                on_progress=on_progress,
            ).run(None)
    assert not done
    slow.released.set()
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert slow.num_asked == 1 < done[0]


@pytest.mark.parametrize("golden", ["qwen3", "encoders/bert"])
def test_who_answers_is_told_before_weights_are_read_and_again_with_them(golden, monkeypatch):
    told = []
    config = SMALL if golden == "qwen3" else EngineConfig(compilation_cache_dir=SMALL.compilation_cache_dir)
    llm = LLM(str(GOLDENS / golden), config, on_identity=told.append)
    early, late = told
    assert early.weights is None and late.weights == llm.identity.weights and len(late.weights) == 32
    assert early == dataclasses.replace(late, weights=None) and llm.identity == late
    assert (late.dtype, late.kv_dtype, late.invariant) == ("float32", "float32", False)
    assert late.environment["mesh"] == "tp=1" and late.environment["jaxlib"]
    assert late.tokenizer == (None if llm.tokenizer is None else llm.tokenizer.digest)
    monkeypatch.setattr("checkpoints.Checkpoint.load", pytest.fail)
    with pytest.raises(ValueError, match="another model"):
        LLM(str(GOLDENS / golden), config, on_identity=raising(ValueError("another model")))


@pytest.mark.slow
def test_only_lengths_and_not_row_counts_are_part_of_the_identity():
    before = small_llm("qwen3").identity
    assert before == small_llm("qwen3", dataclasses.replace(SMALL, max_num_seqs=2)).identity
    assert before != small_llm("qwen3", dataclasses.replace(SMALL, max_model_len=128)).identity


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
