"""The host tier end to end: what a small pool evicts comes back from host memory, with the same tokens."""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.engine.engine import Engine
from ferrum_jax.engine.prefixes.cached_prefixes import prompt_request
from ferrum_jax.engine.prefixes.saved_prefixes import PrefixCache
from tests.support import INVARIANT, SMALL, fresh_engine, run, small_llm, step
from tests.support import answers as together

GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
NUM_BLOCKS = 7  # two of the prompts together do not fit


@pytest.fixture(scope="module")
def prompts(family) -> list[list[int]]:
    """Six prompts: two share their first 48 tokens, and one ends with its block."""
    rng = np.random.default_rng(4)
    made = [rng.integers(6, 250, n).tolist() for n in (70, 75, 60, 64, 90, 33)]
    made[1][:48] = made[0][:48]
    return made


@pytest.fixture(scope="module")
def expected(family, prompts) -> list[tuple[int, ...]]:
    """Each prompt alone, without reuse."""
    llm = small_llm(family)
    return [run(llm, [p], GREEDY, enable_prefix_caching=False)[0].token_ids for p in prompts]


def tiered(llm, num_host_blocks: int, **overrides) -> Engine:
    """An engine with so many usable host blocks; what nobody wrote is NaN on the device."""
    host_cache_bytes = (num_host_blocks + 1) * llm.ledger.host_block_bytes
    return fresh_engine(llm, **{"num_blocks": NUM_BLOCKS, "host_cache_bytes": host_cache_bytes, **overrides})


def answers(engine: Engine, prompts, params=GREEDY) -> list:
    return together(engine, [(prompt, params) for prompt in prompts])


@pytest.mark.parametrize(
    ("num_host_blocks", "overrides"),
    [(60, {}), (16, {}), (60, {"max_num_batched_tokens": 5, "max_cached_prompts": 0})],
    ids=["all fits", "host memory evicts", "small chunks, no prompts"],
)
def test_what_the_pool_evicted_comes_back_with_the_same_tokens(family, prompts, expected, num_host_blocks, overrides):
    """Each prompt alone in turn, then all at once and twice, with two choices and preemption."""
    engine = tiered(small_llm(family), num_host_blocks, **overrides)
    for prompt, wanted in zip(prompts, expected, strict=True):
        assert answers(engine, [prompt])[0].token_ids == wanted
    two = dataclasses.replace(GREEDY, n=2)
    for output, wanted in zip(answers(engine, prompts * 2, two), expected * 2, strict=True):
        assert [choice.token_ids for choice in output.outputs] == [wanted, wanted]
    metrics = engine.scheduler.metrics()
    assert metrics.preemptions and metrics.host_hits and metrics.loaded_blocks and metrics.spilled_blocks
    assert (metrics.host_evictions > 0) == (num_host_blocks == 16)
    assert metrics.host_bytes == metrics.host_entries * small_llm(family).ledger.host_block_bytes


def test_a_prompt_whose_blocks_are_all_in_host_memory_computes_nothing(family, prompts, expected):
    """Its tail is loaded too; its state stayed where it was."""
    engine = tiered(small_llm(family), 60)
    for prompt in (prompts[0], prompts[4], prompts[2]):
        answers(engine, [prompt])
    computed = engine.runner.num_tokens
    (output,) = answers(engine, [prompts[0]])
    assert output.token_ids == expected[0] and output.num_cached_tokens == 70
    assert engine.runner.num_tokens - computed == 9, "what follows the first token"


def test_the_tier_compiles_nothing_after_ready_and_moves_no_pool():
    """Every batch size is used; a view of a pool on the host would stop its donation."""
    base = small_llm("qwen3")
    config = dataclasses.replace(SMALL, host_cache_bytes=200 * base.ledger.host_block_bytes)
    llm = small_llm("qwen3", config)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(6, 250, n).tolist() for n in (230, 240, 40, 235, 250, 250, 240)]
    params = dataclasses.replace(GREEDY, max_tokens=2)
    compiles = llm.stats()["compiles_after_ready"]
    pools = [array.unsafe_buffer_pointer() for array in llm.engine.runner._caches]
    for _ in range(2):
        for prompt in prompts:
            llm.generate([prompt], params, progress=False)
    stats = llm.stats()
    assert stats["compiles_after_ready"] == compiles
    assert stats["spilled_blocks"] > 8 and stats["loaded_blocks"] > 8
    assert (stats["host_cache_bytes"], stats["host_memory_kind"]) == (config.host_cache_bytes, "pinned_host")
    assert [array.unsafe_buffer_pointer() for array in llm.engine.runner._caches] == pools


def test_the_tier_is_off_by_default_and_with_the_cache():
    llm = small_llm("qwen3")
    assert llm.stats()["host_cache_bytes"] == 0 and llm.engine.scheduler.caches[0].tier is None
    assert tiered(llm, 5, enable_prefix_caching=False).scheduler.caches[0].tier is None
    assert all(pool.on_evict is None for pool in llm.engine.scheduler.caches[0].pools)


def test_host_memory_for_no_block_is_refused():
    llm = small_llm("qwen3")
    with pytest.raises(ValueError, match=r"host_cache_bytes is 5; one block of 16 tokens takes \d+ bytes, and two are"):
        tiered(llm, 0, host_cache_bytes=5)


def test_saved_prefixes_include_the_host_tier_and_loading_spills(tmp_path):
    llm = small_llm("qwen3")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(6, 250, 70).tolist() for _ in range(4)]
    engine = tiered(llm, 60)
    tokens = [answers(engine, [prompt])[0].token_ids for prompt in prompts]

    def prefixes(engine: Engine) -> PrefixCache:
        return PrefixCache(
            spec=llm.spec,
            fingerprint=llm.loaded.fingerprint.digest,
            invariant=False,
            caches=engine.scheduler.caches,
            runner=engine.runner,
            copies=llm.loaded.copies,
        )

    assert prefixes(engine).save(tmp_path / "saved") == 4 * 5, "four full blocks and a tail of each"
    large = tiered(llm, 60, num_blocks=30)
    assert len(prefixes(large).put(prefixes(large).read(tmp_path / "saved"))) == 20
    other = tiered(llm, 60)
    other_prompt = rng.integers(6, 250, 100).tolist()
    (first,) = answers(other, [other_prompt])
    prefixes(other).put(prefixes(other).read(tmp_path / "saved"))
    assert other.scheduler.metrics().evictions
    for engine in (large, other):
        for prompt, wanted in zip(prompts[::-1], tokens[::-1], strict=True):
            assert answers(engine, [prompt])[0].token_ids == wanted
    (again,) = answers(other, [other_prompt])
    assert again.token_ids == first.token_ids and again.num_cached_tokens >= 96


def test_pinned_blocks_stay_on_the_device():
    llm = small_llm("qwen3")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(6, 250, 40).tolist() for _ in range(3)]
    engine = tiered(llm, 60)
    answers(engine, prompts[:1])
    cache = engine.scheduler.caches[0]
    engine.scheduler.pin(cache.keys_of(prompt_request(prompts[0])))
    pinned = set(cache.pins.ids(cache.pools[0]))
    for prompt in (*prompts[1:], prompts[0]):
        id = engine.add(prompt, GREEDY)
        while engine.has_unfinished:
            outputs = {output.request_id: output for output in step(engine)}
            engine.scheduler.check_invariants()
    assert outputs[id].num_cached_tokens == 40 and engine.scheduler.metrics().host_hits
    assert cache.pins.ids(cache.pools[0]) == pinned
    assert cache.tier is not None and not any(
        cache.tier.find(0, key) for key in cache.keys_of(prompt_request(prompts[0]))
    )


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("qwen3", "int8"),  # as tests/engine/test_kv_dtype.py
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("deepseek_v3", "auto"),
                ("deepseek_v3", "int8"),
                ("deepseek_v32", "auto"),
                ("glm5", "auto"),
                ("glm5", "int8"),
            ]
        ),
    ],
)
def test_scales_latents_and_an_indexers_keys_come_back_with_their_blocks(name, kv_dtype, tmp_path, monkeypatch):
    """From host memory and from a folder, of layers that share an indexer's choice as well."""
    llm = small_llm(name, dataclasses.replace(INVARIANT, kv_dtype=kv_dtype))
    prompts = [np.random.default_rng(seed).integers(6, 150, 70).tolist() for seed in range(4)]
    params = dataclasses.replace(GREEDY, max_tokens=6)

    def each(engine: Engine) -> list[tuple[int, ...]]:
        return [answers(engine, [prompt], params)[0].token_ids for prompt in prompts]

    expected = each(fresh_engine(llm, enable_prefix_caching=False))
    engine = tiered(llm, 63, num_blocks=12)
    assert [each(engine), each(engine)] == [expected, expected]
    metrics = engine.scheduler.metrics()
    assert metrics.host_hits and metrics.loaded_blocks and metrics.spilled_blocks
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    assert each(llm.engine) == expected
    num_saved = llm.save_prefix_cache(tmp_path / "saved")
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    assert llm.load_prefix_cache(tmp_path / "saved") == num_saved > 0
    assert each(llm.engine) == expected
    assert llm.stats()["saved_prefill_tokens"] >= 4 * 64
