"""What a compiled step does with memory: pools are written in place, and little crosses to the host."""

from __future__ import annotations

import math
import re

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.runtime.runner import InFlight
from ferrum_jax.sampling import RESULT_WORDS
from tests.support import SMALL, small_llm


@pytest.fixture(scope="module")
def loaded():
    return small_llm("qwen3").loaded


def _all_pools(loaded):
    pools = loaded.layout.pools
    return (*pools.flat_kv(), pools.slots, pools.prompts)


def test_every_pool_is_aliased_in_every_bucket(loaded):
    pools = _all_pools(loaded)
    pool_bytes = sum(math.prod(p.shape) * p.dtype.itemsize for p in pools)
    assert len(loaded.executables.steps) == len(loaded.layout.ladder.buckets)
    for bucket, executable in loaded.executables.steps.items():
        header = executable.as_text().split("\n", 1)[0]
        assert header.count("may-alias") + header.count("must-alias") == len(pools), str(bucket)
        assert executable.memory_analysis().alias_size_in_bytes == pool_bytes, str(bucket)


def test_no_step_copies_a_pool(loaded):
    """Under no shape: what has as many elements as a pool or more is a pool, the rest of a step is small."""
    pools = _all_pools(loaded)
    least = min(math.prod(pool.shape) for pool in pools)
    for bucket, executable in loaded.executables.steps.items():
        copies = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", executable.as_text())
        assert copies, "the pattern finds no copy at all"
        sizes = {shape: math.prod(map(int, shape.split(","))) for shape in copies if shape}
        biggest = bucket.num_tokens * loaded.layout.options.spec.vocab_size  # logits of the prompt
        assert {s for s, n in sizes.items() if n >= least and n != biggest} == set(), str(bucket)


def test_a_slot_is_written_in_place(loaded):
    slots = loaded.layout.pools.slots
    analysis = loaded.executables.write_slot.memory_analysis()
    assert analysis.alias_size_in_bytes == math.prod(slots.shape) * slots.dtype.itemsize


def test_blocks_are_copied_in_place(loaded):
    executable = loaded.executables.copy_blocks
    pools = loaded.layout.pools.flat_kv()
    pool_bytes = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
    assert executable.memory_analysis().alias_size_in_bytes == pool_bytes
    assert executable.memory_analysis().temp_size_in_bytes < pool_bytes / 20
    shape = ",".join(map(str, pools[0].shape))
    assert f"[{shape}]" in executable.as_text() and not re.findall(rf"\[{shape}\]\S* copy\(", executable.as_text())


def test_temporaries_of_a_step_are_smaller_than_one_pool(loaded):
    pool_bytes = math.prod(loaded.layout.pools.flat_kv()[0].shape) * loaded.layout.dtype.itemsize
    for bucket, executable in loaded.executables.steps.items():
        assert executable.memory_analysis().temp_size_in_bytes < pool_bytes, str(bucket)


def test_a_step_gives_the_host_one_array_of_a_few_words_a_row(loaded, monkeypatch):
    """Prompt log-probabilities are the other result; without a request for them they stay where they are."""

    def refuse(step):
        raise AssertionError(f"step {step.plan.step} transfers prompt log-probabilities")

    fetched = []
    rows = InFlight.rows
    monkeypatch.setattr(InFlight, "prompt", refuse)
    monkeypatch.setattr(InFlight, "rows", lambda step: fetched.append(rows(step)) or fetched[-1])
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
    small_llm("qwen3").generate([[7] * 20, [9]], params, progress=False)
    assert {(a.dtype.name, a.shape[1]) for a in fetched} == {("int32", RESULT_WORDS)}
    assert all(len(a) <= SMALL.max_num_seqs for a in fetched)
