"""Rows with adapters get what peft gives, whoever runs beside them, and slots follow their users."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import convert, read_adapter
from checkpoints.adapters.lora import WEIGHTS
from checkpoints.placement import weight_shapes
from ferrum_jax import LLM, SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.models.families import registry
from ferrum_jax.runtime.distributed import processes
from ferrum_jax.runtime.lora.adapter_slots import AdapterSlots
from tests.engine.test_goldens import check_equal
from tests.forked import call
from tests.support import GOLDENS, INVARIANT, SMALL, answers, finish, fresh_engine, small_llm
from tests.support import logprobs_of as logprobs

ADAPTERS = GOLDENS / "adapters"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
LLAMA = dataclasses.replace(INVARIANT, max_adapters=3, max_adapter_rank=8)


def open_llm(base: str, config, **names) -> LLM:
    llm = LLM(str(GOLDENS / base), config)
    for name, folder in names.items():
        llm.load_adapter(name, ADAPTERS / folder)
    return llm


@pytest.fixture(scope="module")
def llm() -> LLM:
    return open_llm("llama", LLAMA, patterns="llama_patterns", attention="llama_attention")


def golden(name: str):
    with np.load(ADAPTERS / name / "golden.npz") as kept:
        return tuple([kept[f"{what}_{i}"] for i in range(3)] for what in ("prompt", "tokens", "best"))


def random_adapter(folder, seed: int, rank: int = 4, parts=(("self_attn.q_proj", 60, 84), ("mlp.down_proj", 92, 60))):
    """A LoRA of the first layers: by default of the llama golden's q and down projections."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(3):
        for module, inputs, outputs in parts:
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, inputs), np.float32) * inputs**-0.5
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, rank), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


@pytest.mark.parametrize("name", ["patterns", "attention"])
def test_greedy_tokens_equal_peft(llm, name):
    prompts, tokens, best = golden(f"llama_{name}")
    check_equal(llm.generate([p.tolist() for p in prompts], GREEDY, adapter=name), tokens, best)


def test_rows_of_several_adapters_and_of_none_have_the_bits_of_rows_alone(llm):
    prompts, names = [[7, 8, 9 + i, 10, 11] for i in range(6)], ["patterns", "attention", None] * 2
    together = llm.generate(prompts, SHORT, adapter=names)
    for prompt, name, output in zip(prompts, names, together, strict=True):
        llm.calls.drop()
        (alone,) = llm.generate([prompt], SHORT, adapter=[name])
        assert alone.token_ids == output.token_ids and logprobs(alone) == logprobs(output)


def test_prefixes_of_adapters_do_not_mix_and_the_base_shares_its_own(llm):
    prompt = list(range(20, 60))
    llm.calls.drop()
    hits = [llm.generate([prompt], SHORT, adapter=[name])[0].num_cached_tokens for name in (None, "patterns", None)]
    assert hits[:2] == [0, 0] and hits[2] > 0


def test_slots_are_given_away_least_recently_used_first_and_who_finds_none_waits(llm, tmp_path):
    for i in range(5):
        llm.load_adapter(f"own{i}", random_adapter(tmp_path / str(i), seed=i))
    llm.calls.drop()
    names = [f"own{i % 5}" for i in range(10)]
    together = llm.generate([[5, 6, 7 + i] for i in range(10)], SHORT, adapter=names)
    counts = llm.engine.counts()
    assert counts["adapters_live"] == 0 and counts["adapter_writes"] >= 5 and counts["adapter_evictions"] >= 2
    for i in (0, 4, 9):
        assert llm.generate([[5, 6, 7 + i]], SHORT, adapter=names[i])[0].token_ids == together[i].token_ids
    llm.engine.scheduler.check_invariants()
    for i in range(5):
        llm.unload_adapter(f"own{i}")


def test_an_adapter_that_is_replaced_serves_those_that_named_it_before(llm, tmp_path):
    first, second = (random_adapter(tmp_path / str(i), seed=40 + i) for i in range(2))
    llm.load_adapter("poet", first)
    before = llm.generate([[5, 6, 7]], SHORT, adapter="poet")[0]
    running = llm.engine.add([5, 6, 7], SHORT, RequestOptions(adapter="poet"))
    llm.load_adapter("poet", second)
    later = llm.engine.add([5, 6, 7], SHORT, RequestOptions(adapter="poet"))
    outputs = finish(llm.engine)
    assert outputs[running].token_ids == before.token_ids and logprobs(outputs[later]) != logprobs(before)
    llm.unload_adapter("poet")


@pytest.mark.parametrize(
    "settings",
    [{"enable_prefix_caching": False}, {"num_blocks": 16}, {"max_num_batched_tokens": 24}],
    ids=["cache off", "preemption", "small chunks"],
)
def test_reuse_preemption_and_chunks_change_no_token(llm, settings):
    prompts = [list(range(20 + i, 70 + i)) for i in range(4)]
    params = dataclasses.replace(SHORT, max_tokens=40)
    names = ["patterns", "attention", "", "patterns"]

    def tokens(**changes):
        engine = fresh_engine(llm, adapters=llm.model.adapters, **changes)
        asked = [RequestOptions(adapter=name) for name in names]
        answers(
            engine, [([5, 6], SHORT, options) for options in asked]
        )  # adapters lie in their slots, so rows run at once
        outputs = answers(engine, zip(prompts, [params] * 4, asked, strict=True))
        return [(o.token_ids, logprobs(o)) for o in outputs], engine.scheduler.metrics().preemptions

    found, preemptions = tokens(**settings)
    assert found == tokens()[0] and bool(preemptions) == ("num_blocks" in settings)


def test_loading_compiles_nothing(llm, tmp_path):
    llm.load_adapter("late", random_adapter(tmp_path / "late", seed=9))
    llm.generate([[5, 6, 7]], SHORT, adapter="late")
    llm.unload_adapter("late")
    assert llm.stats()["compiles_after_ready"] == 0


def test_an_aborted_request_gives_its_slot_back(llm):
    for waits in (True, False):
        submission = llm.engine.add([5, 6, 7], SHORT, RequestOptions(adapter="patterns"))
        if not waits:
            llm.engine.step()
        llm.engine.abort(submission)
        llm.engine.drain()
        assert llm.engine.counts()["adapters_live"] == 0


def test_an_adapter_that_does_not_come_to_the_devices_fails_its_requests_alone(llm, tmp_path, monkeypatch):
    llm.load_adapter("heavy", random_adapter(tmp_path / "heavy", seed=77))
    heavy, stage, engine = llm.model.adapters.get("heavy").content, AdapterSlots.stage, llm.engine

    def failing(self, adapter):
        if adapter is heavy:
            raise MemoryError("no room")
        return stage(self, adapter)

    names = ["heavy", "patterns", None, "heavy"]
    with monkeypatch.context() as patched:
        patched.setattr(AdapterSlots, "stage", failing)
        outputs = llm.generate([[5, 6, 7 + i] for i in range(4)], SHORT, adapter=names)
    ended = [(output.outputs[0].finish_reason, output.outputs[0].stop_reason) for output in outputs]
    why = "the adapter could not be brought to the devices, 'heavy': MemoryError: no room"
    assert ended == [("error", why), ("length", None), ("length", None), ("error", why)]
    assert llm.engine is engine and llm.engine.counts()["adapters_live"] == 0
    assert llm.generate([[5, 6, 7]], SHORT, adapter="heavy")[0].outputs[0].finish_reason == "length"
    llm.unload_adapter("heavy")


def test_what_cannot_be_served_is_refused_by_name(llm):
    with pytest.raises(ValueError, match=r"no adapter is called 'nobody'; loaded are attention, patterns"):
        llm.generate([[5]], SHORT, adapter="nobody")
    with pytest.raises(ValueError, match=r"no adapter is called 'nobody'"):
        llm.unload_adapter("nobody")
    with pytest.raises(ValueError, match="2 adapters are given for 1 prompts"):
        llm.generate([[5]], SHORT, adapter=["patterns", "attention"])


def test_several_processes_load_no_adapter(llm, monkeypatch):
    monkeypatch.setattr(processes, "_current", object())
    with pytest.raises(ValueError, match="load_adapter is for one process, and this engine has several"):
        llm.load_adapter("third", ADAPTERS / "llama_attention")
    monkeypatch.undo()
    assert llm.model.adapters.names == ["attention", "patterns"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "name", "sizes", "targets"),
    [
        ("llama", "llama_patterns", SMALL, "attention,mlp"),
        ("llama", "llama_attention", SMALL, "attention,mlp"),
        ("qwen3_moe", "qwen3_moe_experts", INVARIANT, "attention,mlp,experts"),
    ],
)
def test_greedy_tokens_of_other_sizes_and_of_experts_equal_peft(base, name, sizes, targets):
    config = dataclasses.replace(sizes, max_adapters=2, max_adapter_rank=8, adapter_targets=targets)
    (first, *others), tokens, best = golden(name)
    asked, names = [first.tolist(), [5, 6], *(p.tolist() for p in others)], ["one", None, "one", "one"]
    outputs = open_llm(base, config, one=name).generate(asked, GREEDY, adapter=names)
    check_equal([outputs[0], *outputs[2:]], tokens, best)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "name"), [("qwen3_moe", "qwen3_moe_head"), ("llama", "llama_head")])
def test_heads_equal_peft_beside_rows_of_the_base_alone(base, name):
    config = dataclasses.replace(INVARIANT, max_adapters=2, max_adapter_rank=8, adapter_targets="attention,head")
    prompts, tokens, best = golden(name)
    llm, plain = open_llm(base, config, one=name), small_llm(base, INVARIANT)
    asked = [p.tolist() for p in prompts]
    outputs = llm.generate(asked * 2, GREEDY, adapter=["one"] * 3 + [None] * 3)
    check_equal(outputs[:3], tokens, best)
    assert [o.token_ids for o in outputs[3:]] == [o.token_ids for o in plain.generate(asked, GREEDY)]
    with np.load(ADAPTERS / name / "golden.npz") as kept:
        last = kept["last_logits"].astype(np.float64)
    first = int(tokens[0][0])
    (scores,) = llm.compute_logprobs([{"prompt_token_ids": asked[0], "adapter": "one"}], [[first]], progress=False)
    assert scores.logprobs[0] == pytest.approx(last[0][first] - np.logaddexp.reduce(last[0]), abs=1e-4)
    llm.load_adapter("two", ADAPTERS / name)
    llm.unload_adapter("one")
    check_equal(llm.generate(asked, GREEDY, adapter="two"), tokens, best)
    assert llm.stats()["compiles_after_ready"] == 0


def test_a_head_s_adapter_needs_slots_of_the_head(llm):
    with pytest.raises(ValueError, match=r"it adapts head.weight, and adapter_targets does not name head"):
        llm.load_adapter("head", ADAPTERS / "llama_head")


def test_a_head_that_was_trained_whole_is_refused_with_what_it_would_take(llm, tmp_path):
    folder = random_adapter(tmp_path / "whole", seed=3)
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"base_model.model.lm_head.weight": np.ones((300, 60), np.float32)}, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "modules_to_save": ["lm_head"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"300 x 60: .* it would take 72,000 bytes a slot, .*rank 8, .*merge it with"):
        llm.load_adapter("whole", folder)


def said(base: str, adapter: str, targets: str, *meshes: str) -> list[list[tuple[int, ...]]]:
    """Tokens of the golden prompts on each mesh, beside a row without an adapter."""
    prompts, found = [p.tolist() for p in golden(adapter)[0]], []
    for mesh in meshes:
        config = dataclasses.replace(INVARIANT, mesh=mesh, max_adapters=2, max_adapter_rank=8, adapter_targets=targets)
        outputs = open_llm(base, config, one=adapter).generate([[5, 6], *prompts], GREEDY, adapter=[None, *["one"] * 3])
        found.append([output.token_ids for output in outputs[1:]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "adapter", "targets"),
    [
        ("llama", "llama_patterns", "attention,mlp"),
        ("qwen3_moe", "qwen3_moe_experts", "attention,mlp,experts"),
        ("llama", "llama_head", "attention,head"),
        pytest.param("qwen3_moe", "qwen3_moe_head", "attention,head", marks=pytest.mark.long),
    ],
)
def test_meshes_say_what_peft_says(base, adapter, targets):
    _, tokens, best = golden(adapter)
    for found in call(said, base, adapter, targets, "tp=2", "dp=2,tp=2", devices=4):
        check_equal([SimpleNamespace(token_ids=row) for row in found], tokens, best)


@pytest.mark.slow
def test_a_merged_model_says_the_same(tmp_path):
    weights = registry.weights_of(json.loads((GOLDENS / "llama" / "config.json").read_text()))
    adapter = read_adapter(
        ADAPTERS / "llama_patterns", rules=weights.rules, weights=weight_shapes(weights.targets), max_rank=8
    )
    convert(GOLDENS / "llama", tmp_path / "merged", **weights._asdict(), dtype="float32", adapter=adapter)
    prompts, tokens, best = golden("llama_patterns")
    check_equal(LLM(str(tmp_path / "merged"), INVARIANT).generate([p.tolist() for p in prompts], GREEDY), tokens, best)


@pytest.mark.slow
def test_latent_attention_takes_adapters_but_for_the_weight_that_it_takes_apart(tmp_path):
    llm = open_llm("deepseek_v3", dataclasses.replace(INVARIANT, max_adapters=2, max_adapter_rank=4))
    queries = random_adapter(tmp_path / "q", 1, parts=[("self_attn.q_b_proj", 26, 120), ("self_attn.o_proj", 84, 44)])
    llm.load_adapter("q", queries)
    weights = registry.weights_of(json.loads((GOLDENS / "deepseek_v3" / "config.json").read_text()))
    adapter = read_adapter(queries, rules=weights.rules, weights=weight_shapes(weights.targets), max_rank=4)
    convert(GOLDENS / "deepseek_v3", tmp_path / "merged", **weights._asdict(), dtype="float32", adapter=adapter)
    prompts = [[5, 6, 7, 8], [9, 10]]
    merged = LLM(str(tmp_path / "merged"), INVARIANT).generate(prompts, SHORT)
    found = llm.generate(prompts, SHORT, adapter="q")
    assert [out.token_ids for out in found] == [out.token_ids for out in merged]
    assert [out.token_ids for out in found] != [out.token_ids for out in llm.generate(prompts, SHORT)]
    with pytest.raises(ValueError, match=r"layers.0.attention.kv_b.weight and 2 more, to which no slot can add; merge"):
        llm.load_adapter("kv", random_adapter(tmp_path / "kv", 2, parts=[("self_attn.kv_b_proj", 20, 156)]))
