"""A bundle that one command makes runs in another process: the same tokens, and nothing is compiled."""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from concurrent.futures.process import BrokenProcessPool

import jax
import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.__main__ import main
from ferrum_jax.planning.offline import bundle_order
from ferrum_jax.planning.offline import make_bundle as bundling
from ferrum_jax.planning.offline.bundle_order import BundleOrder, BundlePlan
from ferrum_jax.planning.offline.make_bundle import end_with_parent, make_bundle
from ferrum_jax.runtime.compile.bundle import Bundle, Purpose
from ferrum_jax.runtime.compile.compile import Program
from ferrum_jax.runtime.compile.environment import Environment
from tests.forked import call, run
from tests.support import GOLDENS, ROOT, SMALL, small_llm

FLAGS = "--max-num-seqs=4 --max-num-batched-tokens=16 --max-model-len=256 --num-blocks=80 --block-size=16"
PROMPT = list(range(5, 45))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def make(folder, model="qwen3", flags=FLAGS) -> str:
    """What `ferrum-jax compile` says."""
    words = ["compile", "--model", str(GOLDENS / model), "--target", "cpu", "--out", str(folder), *flags.split()]
    ended = run(main, words)
    assert ended.value == 0, ended.stderr
    return ended.stdout


def answered(bundle, model, prompts, adapters=()):
    """Tokens of the prompts, each without an adapter and with every one of these, and what the engine counted."""
    llm = LLM(str(GOLDENS / model), bundle=bundle, require_bundle=True)
    for adapter in adapters:
        llm.load_adapter(adapter, GOLDENS / "adapters" / adapter)
    names = [None, *adapters]
    outputs = [llm.generate(prompts, GREEDY, adapter=name, progress=False) for name in names]
    return [output.token_ids for each in outputs for output in each], llm.stats()


def test_a_mesh_that_leaves_hosts_idle_is_refused_before_compiling(monkeypatch):
    devices = [types.SimpleNamespace(platform="tpu", id=number) for number in range(16)]
    monkeypatch.setattr(bundle_order, "target_devices", lambda target: devices)
    order = BundleOrder(model=str(GOLDENS / "qwen3"), target="tpu:v6e:4x4", config=EngineConfig(mesh="tp=4"))
    with pytest.raises(
        ValueError, match=r"'tp=4', 4 of the 16 devices of tpu:v6e:4x4.*mesh of all 16, or a slice of 4$"
    ):
        order.laid_out()


@pytest.mark.slow
def test_a_bundle_with_slots_serves_adapters_without_a_compile(tmp_path):
    make(tmp_path / "bundle", "llama", f"{FLAGS} --max-adapters=2 --max-adapter-rank=8")
    with np.load(GOLDENS / "adapters" / "llama_patterns" / "golden.npz") as kept:
        prompt, tokens = kept["prompt_0"].tolist(), kept["tokens_0"].tolist()
    (plain, adapted), stats = call(answered, tmp_path / "bundle", "llama", [prompt], ["llama_patterns"])
    assert list(adapted) == tokens[:8] and plain != adapted
    assert (stats["bundle_misses"], stats["compiles_after_ready"], stats["adapter_writes"]) == (0, 0, 1)


@pytest.mark.slow
def test_a_bundle_of_another_process_gives_equal_tokens_and_compiles_nothing(tmp_path):
    bundle = tmp_path / "bundle"
    assert "; 0 were there already" in make(bundle)
    (token_ids,), stats = call(answered, bundle, "qwen3", [PROMPT])
    (expected,) = small_llm("qwen3", SMALL).generate([PROMPT], GREEDY, progress=False)
    assert token_ids == expected.token_ids
    assert (stats["bundle_misses"], stats["compiles_before_ready"], stats["compiles_after_ready"]) == (0, 1, 0)
    assert stats["bundle_hits"] == stats["executables"] - 1, "all but what makes the CPU's pools, which no file holds"
    (damaged, *others) = sorted((bundle / "parts").iterdir())
    damaged.write_bytes(b"nothing")
    assert f"{len(others)} were there already" in make(bundle)
    opened = Bundle.open(bundle)
    assert len(opened.parts) == len(others) + 1 and all(opened.read(name) for name in opened.parts)
    assert len(list((bundle / "parts").iterdir())) == len(others) + 1, "what was damaged is gone"


@pytest.mark.slow
def test_an_encoders_bundle_gives_equal_vectors_and_compiles_nothing(tmp_path):
    model, bundle = GOLDENS / "encoders" / "bert", tmp_path / "bundle"
    make(bundle, "encoders/bert", "--max-num-seqs=8 --max-num-batched-tokens=128 --max-model-len=16")
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=16, compilation_cache_dir=None)
    texts = [[5, 6, 7], [8, 9]]
    bundled = LLM(str(model), bundle=bundle, require_bundle=True)
    for got, wanted in zip(bundled.embed(texts), LLM(str(model), config).embed(texts), strict=True):
        np.testing.assert_array_equal(got.embedding, wanted.embedding)
    stats = bundled.stats()
    assert (stats["bundle_hits"], stats["bundle_misses"]) == (stats["executables"], 0)
    assert stats["compiles_before_ready"] == 0


def compile_for_long() -> None:
    """Stands for a process that compiles."""
    end_with_parent()
    print("begun", flush=True)
    time.sleep(120)
    print("done", flush=True)


@pytest.mark.slow
def test_processes_that_compile_end_with_the_one_that_started_them():
    """However that ends: here it is killed. The pipe closes when its last writer is gone."""
    program = (
        "import multiprocessing; from tests.offline.test_make_bundle import compile_for_long; "
        "child = multiprocessing.get_context('spawn').Process(target=compile_for_long); child.start(); child.join()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"begun\n"
        parent.kill()
        assert parent.stdout.read() == b"", "it went on to its end"


def print_at_sigterm() -> None:
    """What libtpu does in a process that compiles for TPUs."""
    signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"stack trace"))


def test_an_error_or_ctrl_c_ends_what_still_compiles(capfd):
    """Be it the process alone that is told, as `kill -INT` tells it, and not its children too."""
    context = multiprocessing.get_context("spawn")
    processes = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
    with pytest.raises(KeyboardInterrupt), bundling._ended_at_once(processes):
        processes.submit(print_at_sigterm).result()  # it has begun
        job = processes.submit(time.sleep, 120)
        while not job.running():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert isinstance(job.exception(), BrokenProcessPool) and capfd.readouterr().err == ""


class Compiler(concurrent.futures.ThreadPoolExecutor):
    """Stands for processes that compile: each part needs 150 bytes of memory."""

    def submit(self, function, number):
        job = concurrent.futures.Future()
        job.set_result((b"part %d" % number, 150))
        return job


def test_a_step_that_needs_more_than_promised_makes_the_pools_smaller(tmp_path, monkeypatch):
    """The bundle is of the second attempt alone, and one that was begun is continued by a command like the first."""
    own = Purpose(
        target="tpu", device_ids=[0], spec="a", config={}, environment=Environment.of_device(jax.devices()[0])
    )
    programs = [Program(what=f"part {n}", shapes="", mesh=None, trace=None, effort=3 - n) for n in range(3)]
    attempts, shown = [], []

    def begin(order, least):
        attempts.append((order.config.num_blocks, least))
        chosen = order.config.num_blocks or 1000 - max(least, 100)
        return BundlePlan(
            order=order,
            purpose=dataclasses.replace(own, config={"num_blocks": chosen}),
            programs=programs,
            promised=0 if order.config.num_blocks else max(least, 100),
            tried=frozenset() if order.config.num_blocks else frozenset({1}),
        )

    monkeypatch.setattr(BundleOrder, "plan", begin)
    monkeypatch.setattr(bundling, "_start", lambda order, num_processes: Compiler())
    order = BundleOrder(model="none", target="tpu", config=EngineConfig(mesh="tp=1"))
    made = make_bundle(order, tmp_path / "bundle", num_processes=1, on_done=shown.append)
    assert made.num_compiled == 3
    assert attempts == [(None, 0), (None, 150)]
    assert Bundle.open(tmp_path / "bundle").purpose.config == {"num_blocks": 850}
    assert [p.done for p in shown[-4:]] == [0, 1, 2, 3] and shown[-1].share == 1 and shown[-1].left_s == 0
    assert make_bundle(order, tmp_path / "bundle", num_processes=1).num_kept == 3
    assert attempts[2:] == [(850, 0)]
