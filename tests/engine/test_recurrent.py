"""A model whose layers have no cache, one, two or a borrowed one: tokens of a plain forward, whatever is reused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.llm import LLM
from ferrum_jax.models.families.registry import FAMILIES, abstract_model, bind, unbind
from ferrum_jax.models.layers.attention import ForwardContext
from tests.engine.test_goldens import check_again, check_equal
from tests.models import hybrid
from tests.support import INVARIANT, SMALL, fresh_engine

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
LONGEST = 90


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of the test's own family, and its weights."""
    folder = tmp_path_factory.mktemp("hybrid")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, hybrid.NAME, hybrid.FAMILY)
        yield folder, hybrid.save(folder)


@pytest.fixture(scope="module", params=[INVARIANT, pytest.param(SMALL, marks=pytest.mark.slow)], ids=["one", "ladder"])
def llm(checkpoint, request):
    return LLM(str(checkpoint[0]), request.param)


@pytest.fixture(scope="module")
def expected(checkpoint, llm):
    """Prompts, greedy tokens and the two best logits of each step, by whole forward passes without an engine."""
    graph, _ = unbind(abstract_model(llm.spec))
    rng = np.random.default_rng(5)
    prompts = [rng.integers(6, 250, n).tolist() for n in (3, 16, 39, 60, 33)]
    prompts[3][:32] = prompts[4][:32] = prompts[2][:32]

    @jax.jit
    def logits(weights, ids):
        model = bind(graph, weights)
        return model.logits(model(ids, jnp.arange(len(ids)), ForwardContext()))

    tokens, best = [], []
    for prompt in prompts:
        ids, tops = list(prompt), []
        for _ in range(GREEDY.max_tokens):
            padded = np.zeros(LONGEST, np.int32)
            padded[: len(ids)] = ids
            row = np.asarray(logits(checkpoint[1], padded))[len(ids) - 1]
            ids.append(int(row.argmax()))
            tops.append(np.sort(row)[::-1][:2])
        tokens.append(np.array(ids[len(prompt) :]))
        best.append(np.stack(tops))
    assert len({int(t) for row in tokens for t in row}) > 30, "the model says the same all the time"
    return prompts, tokens, best


@pytest.mark.parametrize(
    ("budget", "num_blocks", "reuse"),
    [(16, 80, True), (16, 80, False), (5, 80, True), (16, 8, True)],
    ids=["plain", "off", "chunks", "preemption"],
)
def test_tokens_are_those_of_a_plain_forward_pass(llm, expected, budget, num_blocks, reuse):
    """Each prompt twice at once, as two choices each, and then again; unowned blocks and states hold NaN."""
    sizes = {"max_num_batched_tokens": budget, "num_blocks": num_blocks, "enable_prefix_caching": reuse}
    engine = fresh_engine(llm, **sizes)
    check_again(engine, *expected, used=(0, 0), copies=2, n=2, max_tokens=GREEDY.max_tokens)
    metrics = engine.scheduler.metrics()
    assert bool(metrics.hits) == bool(metrics.snapshots) == bool(metrics.prompt_hits) == reuse
    assert bool(metrics.preemptions) == (num_blocks == 8)


def test_a_repeat_computes_no_prompt_token_and_compiles_nothing(llm, expected):
    compiles = llm.stats()["compiles_after_ready"]  # of this process, so those of `expected` too
    engine = fresh_engine(llm)
    golden = [part[1:] for part in expected]  # the first is shorter than min_cached_prompt_tokens
    for _ in range(2):
        before = engine.runner.num_tokens
        check_again(engine, *golden, used=[0], max_tokens=GREEDY.max_tokens)
    assert engine.runner.num_tokens - before == len(golden[0]) * (GREEDY.max_tokens - 1)
    assert llm.stats()["compiles_after_ready"] == compiles


def test_states_are_written_in_place_and_counted_in_the_ledger(llm):
    layout = llm.loaded.layout
    states = jax.tree.leaves(layout.pools.states[0])
    num_states = 1 + SMALL.max_num_seqs + SMALL.max_state_snapshots
    assert [state.shape for state in states] == [(num_states, hybrid.STATE_SIZE)]
    assert llm.ledger.states_bytes == llm.stats()["states_bytes"] == 2 * num_states * hybrid.STATE_SIZE * 4
    shape = f"f32\\[{num_states},{hybrid.STATE_SIZE}\\]"
    for executable in (*llm.loaded.executables.forwards.values(), llm.loaded.executables["copy_blocks"]):
        assert re.findall(shape, executable.as_text()) and not re.findall(shape + r"\S* copy\(", executable.as_text())


def test_saved_prefixes_hold_snapshots_and_another_engine_resumes_from_them(llm, expected, monkeypatch, tmp_path):
    prompts, tokens, best = (part[1:] for part in expected)

    def fresh():
        monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))

    def answers():
        outputs = llm.generate(prompts, GREEDY, progress=False)
        check_equal([output.outputs[0] for output in outputs], tokens, best)
        return [output.num_cached_tokens for output in outputs]

    fresh()
    answers()
    llm.save_prefix_cache(tmp_path / "saved")
    fresh()
    llm.load_prefix_cache(tmp_path / "saved")
    assert answers() == [len(prompt) for prompt in prompts]
    assert llm.stats()["computed_tokens"] == len(prompts) * (GREEDY.max_tokens - 1)
    assert llm.stats()["snapshots"] > len(prompts)


SHORT = dataclasses.replace(GREEDY, max_tokens=4)


def alone(llm, monkeypatch, **config):
    """The LLM with a fresh engine of other sizes, for prompts that come one after another."""
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm, **config))
    return lambda prompt, params=SHORT: llm.generate([prompt], params, progress=False)[0]


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(6, 250, (count, length)).tolist()


def test_a_pinned_prefix_keeps_its_state_whatever_runs(llm, monkeypatch):
    ask = alone(llm, monkeypatch, max_state_snapshots=4)
    ((prefix,), others) = random_prompts(1, 64, 1), random_prompts(12, 40, 2)
    assert llm.cache_prefix(prefix, pin=True) == 64
    for prompt in others:
        ask(prompt)
    assert ask([*prefix, 7, 8, 9]).num_cached_tokens == 64 and ask(prefix).num_cached_tokens == 64
    llm.unpin_prefixes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching is False, so no prefix is kept; turn it on"),
        ({"max_state_snapshots": 0}, "max_state_snapshots is 0, so no prefix of this recurrent model is kept"),
    ],
)
def test_a_prefix_that_would_not_be_kept_is_refused_before_it_runs(llm, monkeypatch, tmp_path, config, message):
    ask = alone(llm, monkeypatch)
    prompt = random_prompts(1, 40, 3)[0]
    ask(prompt)
    llm.save_prefix_cache(tmp_path / "saved")
    alone(llm, monkeypatch, **config)
    for refused in (
        lambda: llm.cache_prefix(prompt),
        lambda: llm.cache_prefix(prompt, pin=True),
        lambda: llm.load_prefix_cache(tmp_path / "saved", pin=True),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert llm.stats()["steps"] == llm.stats()["entries"] == 0


def test_a_loaded_prefix_that_is_pinned_keeps_its_states(llm, monkeypatch, tmp_path):
    ask = alone(llm, monkeypatch)
    prefix = random_prompts(1, 40, 4)[0]
    llm.cache_prefix(prefix)
    llm.save_prefix_cache(tmp_path / "saved", [prefix])
    ask = alone(llm, monkeypatch, max_state_snapshots=4)
    llm.load_prefix_cache(tmp_path / "saved", pin=True)
    for prompt in random_prompts(12, 40, 5):
        ask(prompt)
    assert ask([*prefix[:32], 7, 8, 9]).num_cached_tokens == 32
    llm.unpin_prefixes()


def test_shared_prefixes_and_answers_are_hit_and_tokens_are_those_without_a_cache(llm, monkeypatch):
    """Five prompts one by one, then five at once, then a chat; 48 tokens are common and 20 their own."""
    (first, second), own = random_prompts(2, 48, 6), random_prompts(10, 20, 7)

    def history(**config):
        ask = alone(llm, monkeypatch, **config)
        outputs = [ask([*first, *tail]) for tail in own[:5]]
        outputs += llm.generate([[*second, *tail] for tail in own[5:]], SHORT, progress=False)
        turn = ask([*own[0], *own[1]], GREEDY)
        outputs += [turn, ask([*own[0], *own[1], *turn.token_ids, *own[2]])]
        return outputs

    cached, plain = history(), history(enable_prefix_caching=False)
    assert [output.token_ids for output in cached] == [output.token_ids for output in plain]
    hits = [output.num_cached_tokens for output in cached]
    by_the_second = 48 if llm.config.max_num_batched_tokens == 16 else 0  # a chunk of 16 ends where the prompts part
    assert hits[:5] == [0, by_the_second, 48, 48, 48] and hits[5:10] == [0, 48, 48, 48, 48]
    assert hits[11] == (40 + GREEDY.max_tokens - 1) // 16 * 16
    assert not any(output.num_cached_tokens for output in plain)
