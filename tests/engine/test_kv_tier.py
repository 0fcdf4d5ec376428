"""A KV tier end to end: what engines computed is hit by others, and no fault of its store changes a token."""

import dataclasses
import os
import random
import threading
import types
from typing import Any

import numpy as np
import pytest

from ferrum_jax import EngineConfig, SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.prefixes import kv_tier, tier_store
from ferrum_jax.engine.prefixes.cached_prefixes import prompt_request
from ferrum_jax.engine.prefixes.tier_store import TierStore
from ferrum_jax.engine.startup import chosen
from ferrum_jax.io import system
from ferrum_jax.llm import LLM
from ferrum_jax.runtime.compile.environment import Environment
from ferrum_jax.runtime.distributed import processes
from tests import forked
from tests.histories import seeded
from tests.support import GOLDENS, INVARIANT, SMALL, answers, fresh_engine, raising, small_llm

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
FAMILIES = ("qwen3", "qwen3_next", "gemma3", "deepseek_v32", "gpt_oss")  # states, windows, latents with indexers, sinks
TIMES_OUT_S = 60.0


def prompt(seed: int, length: int = 70) -> list[int]:
    return np.random.default_rng(seed).integers(6, 150, length).tolist()


def tiered(llm, path, *, compute_s: float = 1e9, **overrides) -> Any:
    """An engine with a tier there, to which computing seems to take so long that all reads are waited for."""
    engine: Any = fresh_engine(llm, kv_tier=str(path), **overrides)
    engine._tier._compute_s = lambda num_tokens: compute_s
    engine._tier.listing_until = system.monotonic() + TIMES_OUT_S
    return engine


def run(engine, *prompts: list[int], **params):
    """Outputs of prompts that run together; what they computed has been written then."""
    outputs = answers(engine, [(ids, dataclasses.replace(GREEDY, **params)) for ids in prompts])
    written = threading.Event()
    engine._tier.store._writes.put(written.set)
    assert written.wait(TIMES_OUT_S)
    return outputs


def counts(engine) -> dict[str, int]:
    return {name.removeprefix("kv_tier_"): count for name, count in engine.counts().items() if "kv_tier" in name}


def cold(llm, *prompts: list[int]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in answers(fresh_engine(llm), [(ids, GREEDY) for ids in prompts])]


def objects(folder) -> list:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)
def test_an_engine_that_starts_again_hits_whole_prompts_with_equal_tokens(family, tmp_path):
    llm, prompts = small_llm(family), [prompt(1), prompt(2, 64), prompt(3, 33)]
    compiles = llm.stats()["compiles_after_ready"]
    expected = cold(llm, *prompts)
    first = tiered(llm, tmp_path)
    assert [output.token_ids for output in run(first, *prompts)] == expected
    again = tiered(llm, tmp_path, check_writes=True)
    outputs = run(again, *prompts)
    assert [output.token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [70, 64, 33]
    assert again.runner.num_tokens == 3 * 5, "nothing but what follows the first token is computed"
    found = counts(again)
    assert (found["hits"], found["hit_tokens"], found["written_bytes"]) == (3, 167, 0), "what is there is not written"
    assert 0 < found["read_bytes"] <= counts(first)["written_bytes"]
    assert llm.stats()["compiles_after_ready"] == compiles


def test_the_next_turn_finds_prompt_and_answer_but_no_other_salt_does(tmp_path):
    llm = small_llm("qwen3")
    (output,) = run(tiered(llm, tmp_path), prompt(1), max_tokens=30)
    turn = [*prompt(1), *output.token_ids, *prompt(2, 20)]
    assert run(tiered(llm, tmp_path), turn)[0].num_cached_tokens == 96, "the last full block of 99 computed tokens"
    other = tiered(llm, tmp_path)
    assert answers(other, [(turn, GREEDY, RequestOptions(cache_salt="b"))])[0].num_cached_tokens == 0


def test_one_store_in_memory_serves_engines_that_run_at_once():
    llm, url = small_llm("qwen3"), "memory://tier-of-two"
    one, other = tiered(llm, url), tiered(llm, url)
    run(one, prompt(1))
    other._tier.store._list()
    assert run(other, prompt(1))[0].num_cached_tokens == 70


@pytest.mark.parametrize("damage", ["changed", "cut off", "another's", "empty"])
def test_an_object_that_is_not_what_its_name_says_is_a_miss_named_once(damage, tmp_path, caplog):
    llm = small_llm("qwen3")
    run(tiered(llm, tmp_path), prompt(1, 64), prompt(2, 64), max_tokens=1)
    blocks = [path for path in objects(tmp_path) if ".0." in path.name]
    contents = [path.read_bytes() for path in blocks]
    whole = bytearray(contents[0])
    whole[len(whole) // 2] ^= 1
    for path, content, other in zip(blocks, contents, contents[::-1], strict=True):
        new = {"changed": bytes(whole), "cut off": content[:-9], "another's": other, "empty": b""}[damage]
        path.write_bytes(new)
    engine = tiered(llm, tmp_path)
    for _ in range(2):
        assert [o.token_ids for o in run(engine, prompt(1, 64), prompt(2, 64))] == cold(
            llm, prompt(1, 64), prompt(2, 64)
        )
    what = "of another engine or block: keys is" if damage == "another's" else "damaged or cut off"
    named = [record.message for record in caplog.records if what in record.message]
    assert len(named) == len({*named}) == counts(engine)["damaged"] == 2
    assert all(any(path.name in text for text in named) for path in blocks)


def test_two_models_and_two_modes_share_a_folder_and_read_none_of_each_others(tmp_path, caplog):
    engines = [small_llm("qwen3"), small_llm("qwen3", INVARIANT), small_llm("qwen2")]
    for llm in engines:
        run(tiered(llm, tmp_path), prompt(1))
    for llm in engines:
        caplog.clear()
        engine = tiered(llm, tmp_path)
        assert run(engine, prompt(1))[0].num_cached_tokens == 70 and counts(engine)["damaged"] == 0
        engine._tier.store._list()
        assert sum("also holds blocks of 2 other engines" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(("config", "cached"), [(SMALL, 70), (INVARIANT, 0)])
def test_a_machine_with_other_bits_is_read_only_where_none_are_promised(config, cached, tmp_path, monkeypatch):
    llm = small_llm("qwen3", config)
    run(tiered(llm, tmp_path), prompt(1))
    here = Environment.of_device(llm.loaded.layout.mesh.devices.flat[0])
    there = dataclasses.replace(here, instruction_set="another")
    monkeypatch.setattr(Environment, "of_device", lambda device: there)
    assert run(tiered(llm, tmp_path), prompt(1))[0].num_cached_tokens == cached


def killed_while_writing(folder) -> None:
    llm = small_llm("qwen3")
    engine = tiered(llm, folder)
    system.replace = lambda *_: os._exit(9)
    run(engine, prompt(1))


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_misses(tmp_path):
    assert forked.run(killed_while_writing, tmp_path).returncode == 9
    assert objects(tmp_path), "the file that was being written"
    llm = small_llm("qwen3")
    for num_cached in (0, 70):
        assert run(tiered(llm, tmp_path), prompt(1))[0].num_cached_tokens == num_cached


def test_a_store_that_hangs_costs_one_wait_and_hits(tmp_path, monkeypatch):
    llm, ends = small_llm("qwen3"), threading.Event()
    run(tiered(llm, tmp_path), prompt(1), prompt(2))
    engine = tiered(llm, tmp_path, compute_s=0.01)
    engine._tier.store._list()
    monkeypatch.setattr(engine._tier.store._store, "read", lambda name: ends.wait() and None)
    assert run(engine, prompt(1))[0].token_ids == cold(llm, prompt(1))[0]
    assert counts(engine)["late"] == 1
    engine.add(prompt(2), GREEDY)
    assert all(submission.fetch is None for submission in engine._submissions.values()), "nobody waits any more"
    assert answers(engine, [(prompt(3), GREEDY)])[0].token_ids == cold(llm, prompt(3))[0]
    ends.set()


def test_a_listing_that_hangs_or_fails_is_waited_for_once(tmp_path, monkeypatch, caplog):
    llm, ends = small_llm("qwen3"), threading.Event()
    monkeypatch.setattr(kv_tier, "_MAX_UNMEASURED_S", 0.0)
    monkeypatch.setattr(TierStore, "_list", lambda store: ends.wait())
    engine = fresh_engine(llm, kv_tier=str(tmp_path))
    assert answers(engine, [(prompt(1), GREEDY)])[0].token_ids == cold(llm, prompt(1))[0]
    ends.set()
    monkeypatch.undo()
    engine = tiered(llm, tmp_path)
    monkeypatch.setattr(engine._tier.store, "_store", raising(OSError("no such bucket")))
    assert run(engine, prompt(1))[0].token_ids == cold(llm, prompt(1))[0]
    assert counts(engine)["failed"] and len(caplog.records) <= 2, "each kind of failure is named once"


def test_reading_that_is_slower_than_computing_is_refused_and_tried_again(tmp_path):
    llm = small_llm("qwen3")
    run(tiered(llm, tmp_path), prompt(1))
    engine = tiered(llm, tmp_path, compute_s=100.0)
    engine._tier.store._list()
    engine._tier._rate = 1.0  # bytes a second
    assert engine._tier.want([prompt_request(prompt(1))]) is None and counts(engine)["slower"] == 1
    while engine._tier.want([prompt_request(prompt(1))]) is None:
        assert counts(engine)["slower"] < 200
    assert counts(engine)["slower"] > 70, "each refusal says a tenth more of the store"


def test_what_does_not_fit_the_queue_is_dropped_and_counted(tmp_path, monkeypatch):
    llm, goes_on = small_llm("qwen3"), threading.Event()
    monkeypatch.setattr(tier_store, "MAX_QUEUED_BYTES", 1)
    engine = tiered(llm, tmp_path)
    engine._tier.store._writes.put(goes_on.wait)
    answers(engine, [(prompt(1), GREEDY)])
    goes_on.set()
    run(engine, prompt(2))
    assert counts(engine)["dropped"] >= 2


def test_what_was_used_least_recently_goes_first(tmp_path, monkeypatch):
    llm, now = small_llm("qwen3"), [1_000_000.0]
    monkeypatch.setattr(system, "now", lambda: now[0])
    lengths = (240, 200, 190)
    for seed, length in enumerate(lengths[:2]):
        now[0] += 10_000
        run(tiered(llm, tmp_path), prompt(seed, length), max_tokens=1)
    now[0] += 10_000
    used = tiered(llm, tmp_path)
    run(used, prompt(0, 240), max_tokens=1)  # stamps it
    run(used, prompt(0, 240), max_tokens=1)
    held = sum(path.stat().st_size for path in objects(tmp_path))
    now[0] += 10_000
    engine = tiered(llm, tmp_path)
    engine._tier.store._max_bytes = held + 1000
    run(engine, prompt(2, 190), max_tokens=1)
    engine._tier.store._prune()
    assert sum(path.stat().st_size for path in objects(tmp_path)) <= held + 1000
    again = tiered(llm, tmp_path)
    cached = [
        run(again, prompt(seed, length), max_tokens=1)[0].num_cached_tokens for seed, length in enumerate(lengths)
    ]
    assert cached == [240, 0, 190]


def test_other_weights_read_and_write_nothing(tmp_path):
    llm = small_llm("qwen3")
    run(tiered(llm, tmp_path), prompt(1))
    engine, before = tiered(llm, tmp_path), objects(tmp_path)
    engine.renew(llm.loaded.weights, b"other", 1)
    assert answers(engine, [(prompt(1), GREEDY)])[0].num_cached_tokens == 0
    assert objects(tmp_path) == before


@pytest.mark.parametrize("fields", [{"enable_prefix_caching": False}, {"return_routed_experts": True}])
def test_a_tier_that_could_keep_nothing_is_refused_by_name(fields):
    with pytest.raises(ValueError, match="kv_tier is 'tier'; it needs enable_prefix_caching, and keeps no experts"):
        EngineConfig(kv_tier="tier", **fields)


def test_a_tier_that_cannot_be_opened_or_of_several_processes_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="nosuch://bucket cannot be opened"):
        LLM(str(GOLDENS / "qwen3"), dataclasses.replace(SMALL, kv_tier="nosuch://bucket"))
    monkeypatch.setattr(processes, "_current", object())
    with pytest.raises(ValueError, match="kv_tier is for one process"):
        order: Any = types.SimpleNamespace(config=EngineConfig(kv_tier="tier"))
        chosen._choose_before(order, small_llm("qwen3").loaded.layout.spec)


class Faulty:
    """A store that loses, damages, delays and refuses as one seed says."""

    def __init__(self, store, draw: random.Random) -> None:
        self._store, self._draw = store, draw

    def _fails(self) -> None:
        if self._draw.random() < 0.15:
            raise OSError("a drawn fault")
        if self._draw.random() < 0.2:
            system.sleep(self._draw.random() * 0.02)

    def names(self, folder: str) -> list[str]:
        self._fails()
        return [name for name in self._store.names(folder) if self._draw.random() < 0.9]

    def read(self, name: str):
        self._fails()
        content, fault = self._store.read(name), self._draw.random()
        if content is None or fault > 0.3:
            return content
        return None if fault < 0.1 else content[: self._draw.randrange(len(content))] if fault < 0.2 else content[::-1]

    def replace(self, name: str, content: bytes, *, lasts: bool) -> None:
        self._fails()
        torn = self._draw.random() < 0.1
        self._store.replace(name, content[: len(content) // 2] if torn else content, lasts=lasts)

    def move(self, name: str, target: str, *, mark: str) -> None:
        self._fails()
        self._store.move(name, target, mark=mark)

    def remove(self, name: str) -> None:
        self._fails()
        self._store.remove(name)


BITS = dataclasses.replace(GREEDY, logprobs=3)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_no_drawn_history_of_engines_and_faults_changes_a_bit(seed, tmp_path):
    """Engines come and go over one folder; some are small or hurried, their stores fail."""
    draw, llm = random.Random(seeded(seed)), small_llm("qwen3", INVARIANT)
    tree = [prompt(branch, 200) for branch in range(3)]
    tree += [[*tree[0][: draw.randrange(16, 150)], *prompt(9 + i, 50)] for i in range(3)]
    expected = [bits(output) for ids in tree for output in answers(fresh_engine(llm), [(ids, BITS)])]
    for _ in range(4):
        sizes = {"num_blocks": draw.choice((80, 18)), "host_cache_bytes": draw.choice((0, 1 << 20))}
        engines = [tiered(llm, tmp_path, compute_s=draw.choice((1e9, 1e9, 0.005)), **sizes) for _ in range(2)]
        for engine in engines:
            store = engine._tier.store
            store._store = Faulty(store._store, random.Random(draw.random()))
            store._max_bytes = draw.choice((1 << 30, 1 << 18))
        for engine in engines:
            asked = [draw.randrange(len(tree)) for _ in range(draw.randrange(1, 5))]
            outputs = run(engine, *[tree[i] for i in asked], logprobs=3)
            engine._tier.rest()
            assert [bits(output) for output in outputs] == [expected[i] for i in asked]
    for _ in range(4):  # stores are whole again: what was damaged is found, a piece behind the other, and replaced
        (output,) = run(tiered(llm, tmp_path), tree[0], logprobs=3)
        assert bits(output) == expected[0]
    assert output.num_cached_tokens == len(tree[0])


def bits(output):
    return [
        (row.token_ids, [sorted((t, e.logprob) for t, e in entry.items()) for entry in row.logprobs])
        for row in output.outputs
    ]


def on_meshes(folder) -> list:
    """Tokens and hits of prompts on meshes that share a tier, one after the other."""
    found = []
    for mesh in ("tp=1", "tp=2", "dp=2,tp=2"):
        llm = LLM(str(GOLDENS / "llama"), dataclasses.replace(SMALL, mesh=mesh, max_num_seqs=2))
        outputs = run(tiered(llm, folder), prompt(1), prompt(2))
        found.append([(output.token_ids, output.num_cached_tokens) for output in outputs])
    return found


@pytest.mark.slow
def test_engines_on_other_meshes_read_what_one_wrote(tmp_path):
    first, *others = forked.call(on_meshes, tmp_path, devices=4)
    assert [num_cached for _, num_cached in first] == [0, 0]
    for found in others:
        assert found == [(token_ids, 70) for token_ids, _ in first]
