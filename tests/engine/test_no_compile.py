"""After it is ready an engine compiles nothing, whatever it is asked; and the default ladder is short.

An engine whose requests are known beforehand makes the executables that they reach, and refuses what is longer.

What steps take is told when it is news: of each number of rows, for each size that is there.
"""

import dataclasses
import itertools
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import LLM, EngineConfig, SamplingParams
from ferrum_jax.core.request_options import NO_OPTIONS
from ferrum_jax.engine import measured_steps
from ferrum_jax.engine.measured_steps import MeasuredSteps
from ferrum_jax.engine.submission import InputProcessor
from ferrum_jax.inputs.sizes.engine_sizes import Reach
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.runtime.buckets import make_ladder
from tests.support import GOLDENS, SMALL, small_llm

MOST_EXECUTABLES = 24
KINDS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5, "seed": 3},
    {"top_p": 0.8, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logit_bias": {5: 2.0, 9: -100.0}, "min_tokens": 3},
    {"logprobs": 20, "n": 3},
    {"prompt_logprobs": 5, "logprobs": 0},
    {"stop": ["e", "or"], "stop_token_ids": [40, 41]},
)


@pytest.mark.usefixtures("compiles_at_start")
def test_a_ragged_workload_of_all_kinds_compiles_nothing():
    llm = LLM(str(GOLDENS / "qwen3"), SMALL)
    rng = np.random.default_rng(8)
    lengths = (1, 2, 15, 16, 17, 33, 100, 7, 200)
    prompts = [rng.integers(6, 250, n).tolist() for n in lengths]
    params = [SamplingParams(max_tokens=m, **kind) for m, kind in zip(itertools.cycle((9, 1, 4)), KINDS, strict=False)]
    steps = llm.stats()["steps"]
    llm.generate(prompts, params, progress=False)
    list(llm.stream(prompts[3], params[1]))
    llm.generate(prompts[::-1], params, progress=False)
    stats = llm.stats()
    assert stats["steps"] > steps + 30
    assert stats["compiles_after_ready"] == 0


@pytest.mark.parametrize("on_recompile", ["warn", "error"])
def test_a_step_that_compiles_is_said_or_refused_and_counted(monkeypatch, on_recompile):
    llm = small_llm("qwen3")
    monkeypatch.setattr(llm.calls, "_on_recompile", on_recompile)
    step = llm.engine.step

    def step_that_compiles():
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
        return step()

    monkeypatch.setattr(llm.engine, "step", step_that_compiles)
    monkeypatch.setattr(llm.calls, "num_compiles", 0)  # other tests use this LLM
    expected = pytest.warns(RuntimeWarning, match=r"a step compiled 1 program")
    if on_recompile == "error":
        expected = pytest.raises(RuntimeError, match=r"a step compiled 1 program.*on_recompile='warn'")
    with expected:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), progress=False)
    assert llm.stats()["compiles_after_ready"] > 0


@pytest.mark.parametrize("who", ["another thread", "the user"])
def test_what_others_compile_meanwhile_is_not_the_steps(who):
    llm = small_llm("qwen3")

    def compile():
        jax.jit(lambda x: x - 1).lower(jax.ShapeDtypeStruct((5,), jnp.float32)).compile()

    outputs = llm.stream([5, 6, 7], SamplingParams(max_tokens=3, temperature=0.0))
    next(outputs)
    if who == "the user":
        compile()
    else:
        thread = threading.Thread(target=compile)
        thread.start()
        thread.join()
    list(outputs)
    assert llm.stats()["compiles_after_ready"] == 0


@pytest.mark.parametrize("invariant", [False, True])
def test_the_default_ladder_has_few_executables(invariant):
    config = EngineConfig(invariant=invariant)
    ladder = make_ladder(
        max_num_seqs=config.rows_on("tpu"),
        max_num_batched_tokens=config.max_num_batched_tokens,
        table_width=ceil_div(32768, 16),
        invariant=config.invariant,
    )
    assert len(ladder.buckets) + 1 <= MOST_EXECUTABLES, "the forwards and the write of a slot"
    assert len(ladder.row_buckets) <= len(ladder.buckets) / 2, "what samples is compiled once for many forwards"


PROMPTS = [[5, 6, 7] * 9, list(range(40, 60))]


def test_a_part_of_the_ladder_gives_the_same_tokens():
    asked = []

    def reach(token_ids, max_model_len):
        asked.append((token_ids([1, 2]), max_model_len))
        return Reach(num_rows=2, num_tokens=100)

    llm = LLM(str(GOLDENS / "qwen3"), SMALL, reach=reach)
    assert asked == [([1, 2], SMALL.max_model_len)]
    assert [str(bucket) for bucket in llm.loaded.layout.ladder.buckets] == [
        "decode T=1 R=1 M=16",
        "decode T=2 R=2 M=16",
        "decode T=4 R=4 M=16",  # with which every start begins
        "mixed T=16 R=4 M=16",
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    found, expected = llm.generate(PROMPTS, params), small_llm("qwen3").generate(PROMPTS, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert llm.stats()["compiles_after_ready"] == 0


@pytest.mark.parametrize(("max_tokens", "most"), [(33, 41), (None, 100)])
def test_a_request_longer_than_the_reach_is_refused(max_tokens, most):
    input_processor = InputProcessor(
        tokenizer=None,
        vocab_size=50,
        end_ids=frozenset(),
        max_model_len=100,
        max_request_tokens=40,
        seed=0,
        grammar=lambda _: None,
        adapter=lambda name: None,
    )
    input_processor.take([1] * 8, SamplingParams(max_tokens=32), NO_OPTIONS)
    with pytest.raises(ValueError, match=f"may have {most} tokens, and this engine's reach is requests of at most 40"):
        input_processor.take([1] * 8, SamplingParams(max_tokens=max_tokens), NO_OPTIONS)


LADDER = make_ladder(max_num_seqs=4, max_num_batched_tokens=64, table_width=4, invariant=False)
BUCKETS = {(bucket.num_tokens, bucket.decode_only): bucket for bucket in LADDER.buckets}


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(measured_steps, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def ended(times: MeasuredSteps, clock, seconds: float, bucket, rows: int, drafts: int = 0, prompt: int = 0) -> None:
    """A step that began where the one before it ended."""
    begun_s = clock.s
    clock.s += seconds
    counts = np.full(rows, 1 + drafts + prompt)
    shard = SimpleNamespace(counts=counts, num_drafts=np.full(rows, drafts), num_rows=rows)
    times.ended(SimpleNamespace(plan=SimpleNamespace(shards=[shard], has_drafts=drafts > 0), bucket=bucket), begun_s)


def test_what_is_not_measured_costs_as_its_weights_and_tokens_say(clock):
    (costs,) = MeasuredSteps(accelerator=False).news(LADDER)
    assert costs.num_rows == 4 and dict(costs.sizes)[16] / costs.bare == pytest.approx(2 / 1.25)
    (costs,) = MeasuredSteps(accelerator=True).news(LADDER)
    assert dict(costs.sizes)[64] / costs.bare < 1.3, "weights are what takes long there"


def test_measured_times_are_medians_without_the_first_step_of_a_bucket(clock):
    times = MeasuredSteps(accelerator=False)
    for seconds in (9.0, 0.1, 0.1, 5.0, 0.1):
        ended(times, clock, seconds, BUCKETS[1, True], rows=1)
    for seconds in (9.0, 0.3, 0.3):
        ended(times, clock, seconds, BUCKETS[16, False], rows=1, drafts=3)
    (costs,) = times.news(LADDER)
    assert (costs.num_rows, costs.bare) == (1, pytest.approx(0.1))
    assert dict(costs.sizes)[16] == pytest.approx(0.3) and dict(costs.sizes)[32] == pytest.approx(0.3 * 3 / 2)


def test_steps_that_compute_a_prompt_and_times_of_rest_are_left_out(clock):
    times = MeasuredSteps(accelerator=False)
    for _ in range(3):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
        ended(times, clock, 7.0, BUCKETS[16, False], rows=1, prompt=9)
        clock.s += 1000.0  # nobody asked for anything
    (costs,) = times.news(LADDER)
    assert costs.bare == pytest.approx(0.1) and max(seconds for _, seconds in costs.sizes) < 1


def test_only_news_are_told_and_what_is_old_is_forgotten(clock):
    times = MeasuredSteps(accelerator=False)
    assert times.news(LADDER) and not times.news(LADDER)
    for _ in range(20):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    assert times.news(LADDER)
    for _ in range(20):
        ended(times, clock, 0.101, BUCKETS[1, True], rows=1)
    assert not times.news(LADDER), "it changed by less than a tenth"
    ended(times, clock, 0.1, BUCKETS[16, False], rows=1, drafts=2)
    ended(times, clock, 50.0, BUCKETS[16, False], rows=1, drafts=2)
    for _ in range(8):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    (costs,) = times.news(LADDER)
    assert dict(costs.sizes)[16] == 50.0
    for _ in range(600):
        ended(times, clock, 0.1, BUCKETS[1, True], rows=1)
    (costs,) = times.news(LADDER)
    assert dict(costs.sizes)[16] < 1, "a bad moment does not count for ever"


def test_sizes_that_are_missing_are_not_told(clock):
    some = dataclasses.replace(LADDER, missing=frozenset([BUCKETS[16, False]]))
    (costs,) = MeasuredSteps(accelerator=False).news(some)
    assert 16 not in dict(costs.sizes) and 32 in dict(costs.sizes)
