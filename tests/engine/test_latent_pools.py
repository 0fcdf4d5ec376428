"""A cache of latents end to end: in int8 too, its blocks come back from host memory and from a folder as others do.

Layers with an indexer bring its keys along, in one cache group with layers that share its choice.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from tests.support import INVARIANT, fresh_engine, small_llm
from tests.support import answers as together

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(6, 150, 70).tolist() for seed in range(4)]


def answers(engine) -> list[tuple[int, ...]]:
    """Answers of each prompt alone, in turn."""
    return [together(engine, [(prompt, PARAMS)])[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("deepseek_v3", "auto"), ("deepseek_v3", "int8"), ("deepseek_v32", "auto"), ("glm5", "auto"), ("glm5", "int8")],
)
def test_blocks_of_latents_come_back_from_host_memory_and_from_a_folder(name, kv_dtype, tmp_path, monkeypatch):
    llm = small_llm(name, dataclasses.replace(INVARIANT, kv_dtype=kv_dtype))
    expected = answers(fresh_engine(llm, enable_prefix_caching=False))
    tiered = fresh_engine(llm, num_blocks=12, host_cache_bytes=64 * llm.ledger.host_block_bytes)
    assert [answers(tiered), answers(tiered)] == [expected, expected]
    metrics = tiered.scheduler.metrics()
    assert metrics.host_hits and metrics.loaded_blocks and metrics.spilled_blocks
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    assert answers(llm.engine) == expected
    num_saved = llm.save_prefix_cache(tmp_path / "saved")
    monkeypatch.setattr(llm.calls, "_engine", fresh_engine(llm))
    assert llm.load_prefix_cache(tmp_path / "saved") == num_saved > 0
    assert answers(llm.engine) == expected
    assert llm.stats()["saved_prefill_tokens"] >= 4 * 64
