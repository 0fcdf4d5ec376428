"""An engine is ready with its first executables; the others come while it works, and answers are the same."""

import dataclasses
import shutil
import threading
import time

import jax
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.scheduler.request_log import read_request_log
from ferrum_jax.engine.startup import behind
from ferrum_jax.engine.startup.behind import compile_behind
from ferrum_jax.engine.startup.build_engine import build_engine
from ferrum_jax.llm import LLM
from ferrum_jax.planning.offline.replay import replay
from ferrum_jax.runtime.buckets import FIRST_TOKENS, Bucket, RowBucket, make_ladder
from ferrum_jax.runtime.compile.deferred import DeferredExecutable, Prepared
from ferrum_jax.runtime.compile.executable_store import ExecutableStore, _checked
from ferrum_jax.runtime.compile.lowered import Lowered
from ferrum_jax.runtime.compile.worth import Saving, Worth
from ferrum_jax.runtime.programs import Executables, programs_of
from tests.support import GOLDENS, INVARIANT, SMALL, finish, raising, run, small_llm, step

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [[7] * 20, [9], [3, 4, 5, 6] * 8]
FIRST = dataclasses.replace(SMALL, ready="first")


@pytest.fixture(autouse=True)
def _compiled_before(compiles_at_start):
    """Stores, and engines over what is loaded, have all."""
    small_llm("qwen3").loaded.executables.load()


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
    forward, decode, rows = ladder.first_parts(FIRST_TOKENS)
    assert (forward.num_tokens, forward.decode_only, rows.num_rows) == (128, False, 16)
    assert (decode.num_tokens, decode.decode_only) == (16, True), "no step of 16 tokens is computed as 128"
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
    assert early.find(num_tokens=1, num_rows=1, longest=1) == first[1]
    assert dataclasses.replace(ladder, missing=missing - {ladder.buckets[-1]}).most_tokens is None


@pytest.mark.parametrize("steps_before", [0, 3])
def test_answers_are_the_same_with_the_first_executables_and_when_others_come(steps_before):
    llm = small_llm("qwen3")
    expected = [output.outputs[0] for output in run(llm, PROMPTS[:2], GREEDY)]
    early = executables_of(llm.loaded, only_first=True)
    engine = build_engine(dataclasses.replace(llm.loaded, executables=early), llm.config, None)
    assert engine.runner.num_missing == 4
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
    outputs = {}
    for _ in range(steps_before):
        outputs |= {output.request_id: output for output in step(engine)}
    assert bool(early.worth.wanted) == bool(steps_before), "padding says what is wanted"
    whole = executables_of(llm.loaded, only_first=False)
    if steps_before:
        for part in early.missing(llm.loaded.layout.ladder):
            of = whole.forwards if part in whole.forwards else whole.samples
            early.put(part, DeferredExecutable.made(of[part]))
    outputs |= finish(engine)
    assert engine.runner.num_missing == (0 if steps_before else 4)
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
    assert engine.runner.ladder.most_tokens == 128 and found[0] == found[1]


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
    early.worth.done(16, 0.0)  # as if a step had taken long
    early.worth.want(decode, Saving(tokens=15))
    monkeypatch.setattr(ExecutableStore, "get", raising(RuntimeError("no compiler")))
    said = []
    monkeypatch.setattr(behind.warnings, "warn", lambda text, *_, **__: said.append(text))
    thread = compile_behind(llm.loaded.layout, early, store)
    assert thread is not None
    thread.join(60)
    assert len(said) == 1 and "no compiler" in said[0]
    assert "the engine continues with the executables that it has" in said[0]
    engine = build_engine(dataclasses.replace(llm.loaded, executables=early), llm.config, None)
    id = engine.add(PROMPTS[0], GREEDY)
    assert len(finish(engine)[id].token_ids) == 6


def test_nothing_is_compiled_behind_an_engine_that_has_all():
    llm = small_llm("qwen3")
    layout = llm.loaded.layout
    store = ExecutableStore(SMALL.compilation_cache_dir, layout.mesh.devices.flatten().tolist())
    layout = dataclasses.replace(layout, ladder=dataclasses.replace(layout.ladder, has_launches=False))
    assert compile_behind(layout, llm.loaded.executables, store) is None


def wanting(early: Executables, wanted: dict[Bucket | RowBucket, Saving]) -> None:
    """Steps of 16 and 128 tokens that took 2 and 9 seconds, and what was wanted."""
    early.worth._seconds = {16: (2.0, 1), 128: (9.0, 1)}
    for part, saving in wanted.items():
        early.worth.want(part, saving)


def test_what_pays_is_compiled_and_nothing_else(tmp_path):
    llm = small_llm("qwen3")
    ladder = llm.loaded.layout.ladder
    early = executables_of(llm.loaded, only_first=True)
    cheap, dear = sorted(b for b in early.missing(ladder) if isinstance(b, Bucket))[:2]
    store = store_without(tmp_path / "store", missing=[])
    assert store.compile_seconds(programs_of(llm.loaded.layout)[cheap].description) is None, "it compiled nothing yet"
    wanting(early, {cheap: Saving(tokens=30)})  # 1.9 of 3 seconds
    looks = behind._Behind(llm.loaded.layout, early, store)
    assert looks._what_pays(early, early.missing(ladder)) is None
    wanting(early, {dear: Saving(tokens=60)})  # 3.8
    thread = compile_behind(llm.loaded.layout, early, store)
    assert thread is not None
    until = time.monotonic() + 60
    while dear not in early.forwards and time.monotonic() < until:
        time.sleep(0.01)
    assert dear in early.forwards and cheap not in early.forwards and not early.worth.wanted
    (told,) = early.worth.report()
    assert told["what"] == str(dear) and told["saved_s"] == 0
    early.worth.ran(dear)
    assert early.worth.report()[0]["saved_s"] > 0
    del early  # its last user
    thread.join(60)
    assert not thread.is_alive()


def test_a_step_and_its_tokens_are_told_apart_by_steps_of_two_sizes():
    worth = Worth()
    worth._seconds = {16: (2.0, 1)}
    assert worth.seconds(Saving(tokens=16)) == 2.0 and worth.seconds(Saving(steps=1)) == 0
    worth._seconds = {16: (4.0, 2), 128: (9.0, 1)}
    assert worth.seconds(Saving(tokens=112)) == pytest.approx(7) and worth.seconds(Saving(steps=1)) == pytest.approx(1)
    worth._seconds = {16: (9.0, 1), 128: (2.0, 1)}
    assert worth.seconds(Saving(tokens=100)) == 0, "smaller steps that take longer save nothing"


def test_the_store_knows_what_a_compile_of_a_layout_took(tmp_path):
    store = ExecutableStore(str(tmp_path / "store"))
    lower = jax.jit(lambda x: x + 1).lower
    store.get("one\nof some shapes", lambda: Lowered(lower(1.0)))
    measured = store.compile_seconds("two\nof some shapes")
    assert measured is not None and 0 < measured < 60 and store.compile_seconds("one\nof other shapes") is None
    store._write(store._path_of_seconds("one\nof some shapes"), _checked(b"3 seconds"))
    assert store.compile_seconds("one\nof some shapes") is None, "what nobody can read was not measured"


@pytest.mark.slow
def test_steps_take_what_was_compiled_while_they_ran(tmp_path):
    layout = small_llm("qwen3").loaded.layout
    missing = [layout.ladder.buckets[0], layout.ladder.row_buckets[0]]
    store = store_without(tmp_path / "store", missing=missing)
    description = programs_of(layout)[missing[0]].description
    store._write(store._path_of_seconds(description), _checked(b"0.001"))
    llm = LLM(str(GOLDENS / "qwen3"), dataclasses.replace(FIRST, compilation_cache_dir=str(tmp_path / "store")))
    assert llm.stats()["executables_missing"] == 2
    prompts = PROMPTS[:1]
    expected = [output.token_ids for output in small_llm("qwen3").generate(prompts, GREEDY, progress=False)]
    until = time.monotonic() + 300
    while llm.stats()["executables_missing"] == 2 and time.monotonic() < until:
        assert [output.token_ids for output in llm.generate(prompts, GREEDY, progress=False)] == expected
    stats = llm.stats()
    assert stats["executables_compiled"][0]["what"] == str(missing[0]) and stats["compiles_after_ready"] == 0
    assert stats["executables_compiled"][0]["seconds"] > 0


def engine_with_score(load, **overrides):
    """An engine whose prompt log-probabilities are compiled by `load` when they are asked for."""
    llm = small_llm("qwen3")
    early = executables_of(llm.loaded, only_first=True)
    others = {name: DeferredExecutable.made(early.others[name]) for name in early.others}
    others["score"] = DeferredExecutable(load, compiles=True)
    loaded = dataclasses.replace(llm.loaded, executables=dataclasses.replace(early, others=Prepared(others)))
    return build_engine(loaded, dataclasses.replace(llm.config, **overrides), llm.tokenizer)


ASKS = dataclasses.replace(GREEDY, prompt_logprobs=2)


def test_scores_are_compiled_when_they_are_asked_for_and_no_step_waits():
    llm = small_llm("qwen3")
    expected = run(llm, PROMPTS[:1], ASKS)[0].prompt_logprobs
    may_end, made = threading.Event(), []

    def slow():
        may_end.wait(60)
        made.append(threading.current_thread().name)
        return llm.loaded.executables["score"]

    engine = engine_with_score(slow)
    asking = [engine.add(PROMPTS[0], ASKS)]
    assert not step(engine) and not made, "nothing else is to do, and more may come"
    plain = engine.add(PROMPTS[1], GREEDY)
    asking.append(engine.add(PROMPTS[0], ASKS))
    outputs = {}
    while plain not in outputs:
        outputs |= {output.request_id: output for output in step(engine)}
    assert not made and not outputs.keys() & {*asking}, "the row beside them ended meanwhile"
    may_end.set()
    outputs |= finish(engine)
    assert [outputs[id].prompt_logprobs for id in asking] == [expected] * 2 and made == ["make an executable"]


def test_scores_that_cannot_be_compiled_end_those_who_ask_and_nobody_else():

    engine = engine_with_score(raising(RuntimeError("no compiler")))
    plain, *asking = (engine.add(prompt, params) for prompt, params in zip(PROMPTS, (GREEDY, ASKS, ASKS), strict=True))
    outputs = finish(engine)
    asking.append(engine.add(PROMPTS[0], ASKS))  # when it is known already
    outputs |= finish(engine)
    assert len(outputs[plain].token_ids) == 6
    for id in asking:
        (choice,) = outputs[id].outputs
        assert choice.finish_reason == "error" and "no compiler" in str(choice.stop_reason)


def test_a_replay_queues_a_request_when_its_scores_were_compiled(tmp_path):
    may_end = threading.Event()

    def slow():
        may_end.wait(60)
        return small_llm("qwen3").loaded.executables["score"]

    path = tmp_path / "requests.jsonl"
    engine = engine_with_score(slow, request_log=str(path))
    engine.add(PROMPTS[0], ASKS)
    engine.add(PROMPTS[0], GREEDY)  # runs before it, and hits nothing
    for _ in range(3):
        step(engine)
    may_end.set()
    finish(engine)
    found = replay(read_request_log(path), SMALL.num_blocks or 0)
    assert (engine.scheduler.metrics().hit_tokens, found.hit_tokens, found.lookups) == (0, 0, 1)
