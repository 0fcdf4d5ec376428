"""An engine is ready with its first executables; the others come while it works, and answers are the same."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.executables.deferred import DeferredExecutable, Prepared
from ferrum_jax.executables.executable_store import ExecutableStore
from ferrum_jax.llm import LLM
from ferrum_jax.runtime.buckets import FIRST_TOKENS, make_ladder
from ferrum_jax.runtime.programs import Executables, programs_of
from ferrum_jax.startup import behind
from ferrum_jax.startup.behind import compile_behind
from ferrum_jax.startup.build_engine import build_engine
from tests.support import GOLDENS, INVARIANT, ROOT, SMALL, finish, run, small_llm, step

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [[7] * 20, [9], [3, 4, 5, 6] * 8]
FIRST = dataclasses.replace(SMALL, ready="first")


def executables_of(loaded, *, only_first: bool) -> Executables:
    """Executables of an engine that has just become ready."""
    ladder, made = loaded.layout.ladder, loaded.executables
    parts = ladder.first_parts(FIRST_TOKENS) if only_first else (*ladder.buckets, *ladder.row_buckets)
    return Executables(
        forwards=Prepared({b: DeferredExecutable.made(made.forwards[b]) for b in ladder.buckets if b in parts}),
        samples=Prepared({b: DeferredExecutable.made(made.samples[b]) for b in ladder.row_buckets if b in parts}),
        others=made.others,
    )


def test_the_first_bucket_holds_all_rows_and_enough_tokens():
    ladder = make_ladder(max_num_seqs=16, max_num_batched_tokens=2048, table_width=8, invariant=False)
    forward, rows = ladder.first_parts(FIRST_TOKENS)
    assert (forward.num_tokens, forward.decode_only, rows.num_rows) == (128, False, 16)
    many = make_ladder(max_num_seqs=300, max_num_batched_tokens=2048, table_width=8, invariant=False)
    assert many.first_parts(FIRST_TOKENS)[0].num_tokens == 384
    few = make_ladder(max_num_seqs=4, max_num_batched_tokens=16, table_width=8, invariant=False)
    assert few.first_parts(FIRST_TOKENS)[0].num_tokens == 16


def test_the_budget_follows_the_largest_bucket_that_is_there():
    ladder = make_ladder(max_num_seqs=16, max_num_batched_tokens=2048, table_width=8, invariant=False)
    first = ladder.first_parts(FIRST_TOKENS)
    missing = frozenset((*ladder.buckets, *ladder.row_buckets)) - set(first)
    early = dataclasses.replace(ladder, missing=missing)
    assert early.most_tokens == 128 and ladder.most_tokens is None
    assert early.find(num_tokens=1, num_rows=1, longest=1) == first[0]
    assert dataclasses.replace(ladder, missing=missing - {ladder.buckets[-1]}).most_tokens is None


@pytest.mark.parametrize("steps_before", [0, 3])
def test_answers_are_the_same_with_the_first_executables_and_when_others_come(steps_before):
    llm = small_llm("qwen3")
    expected = [output.outputs[0] for output in run(llm, PROMPTS, GREEDY)]
    early = executables_of(llm.loaded, only_first=True)
    engine = build_engine(dataclasses.replace(llm.loaded, executables=early), llm.config, None)
    assert engine.runner.num_missing == 5
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    outputs = {}
    for _ in range(steps_before):
        outputs |= {output.request_id: output for output in step(engine)}
    assert bool(early.wanted) == bool(steps_before), "padding says what is wanted"
    whole = executables_of(llm.loaded, only_first=False)
    if steps_before:
        for part in early.missing(llm.loaded.layout.ladder):
            of = whole.forwards if part in whole.forwards else whole.samples
            early.put(part, DeferredExecutable.made(of[part]))
    outputs |= finish(engine)
    assert engine.runner.num_missing == (0 if steps_before else 5)
    for id, own in zip(ids, expected, strict=True):
        assert outputs[id].outputs[0].token_ids == own.token_ids


@pytest.mark.slow
def test_in_invariant_mode_no_bit_depends_on_which_executables_are_there():
    config = dataclasses.replace(INVARIANT, max_num_batched_tokens=256)
    llm = small_llm("qwen3", config)
    early = executables_of(llm.loaded, only_first=True)
    loaded = dataclasses.replace(llm.loaded, executables=early)
    prompts = [[*PROMPTS[0], *range(6, 200)], *PROMPTS]
    found = []
    for source in (llm.loaded, loaded):
        engine = build_engine(source, llm.config, None)
        ids = [engine.add(prompt, GREEDY) for prompt in prompts]
        outputs = finish(engine)
        found.append([outputs[id].outputs[0].logprobs for id in ids])
    assert engine.runner.most_tokens == 128 and found[0] == found[1]


def store_without(folder, *, missing) -> ExecutableStore:
    """A store in a folder that has all executables of a small engine but some."""
    layout = small_llm("qwen3").loaded.layout
    devices = layout.mesh.devices.flatten().tolist()
    full, store = ExecutableStore(SMALL.compilation_cache_dir, devices), ExecutableStore(str(folder), devices)
    for part, program in programs_of(layout).items():
        if part not in missing and full.has(program.description):
            for path in (full._path(full._tracing, program.description), full._named_by(program.description)):
                shutil.copy(path, store._folder / path.name)
    return store


def test_a_background_compile_that_fails_is_said_once_and_the_engine_goes_on(tmp_path, monkeypatch):
    llm = small_llm("qwen3")
    decode = llm.loaded.layout.ladder.buckets[0]
    store = store_without(tmp_path / "store", missing=[decode])
    early = executables_of(llm.loaded, only_first=True)
    monkeypatch.setattr("ferrum_jax.processes.fresh._PROGRAM", "raise SystemExit(3)")
    monkeypatch.setattr(behind, "_BEGIN_S", 0.0)
    said = []
    monkeypatch.setattr(behind.warnings, "warn", lambda text, *_, **__: said.append(text))
    thread = compile_behind(llm.loaded.layout, early, store, None)
    assert thread is not None
    thread.join(60)
    assert len(said) == 1 and "the engine continues with those that it has" in said[0]
    engine = build_engine(dataclasses.replace(llm.loaded, executables=early), llm.config, None)
    id = engine.add(PROMPTS[0], GREEDY)
    assert len(finish(engine)[id].token_ids) == 6


def test_nothing_is_compiled_behind_an_engine_that_has_all():
    llm = small_llm("qwen3")
    layout = llm.loaded.layout
    store = ExecutableStore(SMALL.compilation_cache_dir, layout.mesh.devices.flatten().tolist())
    assert compile_behind(layout, llm.loaded.executables, store, None) is None


@pytest.mark.slow
def test_a_child_compiles_what_is_missing_and_steps_take_it(tmp_path):
    layout = small_llm("qwen3").loaded.layout
    store_without(tmp_path / "store", missing=[layout.ladder.buckets[0], layout.ladder.row_buckets[0]])
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(FIRST, compilation_cache_dir=str(tmp_path / "store")))
    assert llm.stats()["executables_missing"] == 2
    expected = [output.token_ids for output in small_llm("qwen3").generate(PROMPTS, GREEDY, progress=False)]
    until = time.monotonic() + 300
    while llm.stats()["executables_missing"] and time.monotonic() < until:
        assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY, progress=False)] == expected
    stats = llm.stats()
    assert (stats["executables_missing"], stats["compiles_after_ready"]) == (0, 0)


@pytest.mark.slow
def test_ctrl_c_ends_the_child(tmp_path):
    layout = small_llm("qwen3").loaded.layout
    store_without(tmp_path / "store", missing=[layout.ladder.buckets[0]])
    program = (
        "import sys, time; from ferrum_jax import LLM, EngineConfig\n"
        f"config = EngineConfig(**{dataclasses.asdict(FIRST) | {'compilation_cache_dir': str(tmp_path / 'store')}!r})\n"
        f"llm = LLM({str(GOLDENS / 'qwen3')!r}, config); print('ready', flush=True); time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        until = time.monotonic() + 30
        while not (children := _children(process.pid)) and time.monotonic() < until:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    assert children, "it has begun to compile"
    until = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{child}") for child in children) and time.monotonic() < until:
        time.sleep(0.2)
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]


def _children(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in path.read_text().split()]
    return found
