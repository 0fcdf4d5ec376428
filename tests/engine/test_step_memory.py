"""What a compiled step does with memory: pools are written in place, and little crosses to the host."""

import math
import re

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.runtime.buckets import Bucket, RowBucket
from ferrum_jax.runtime.dispatched import InFlight
from ferrum_jax.runtime.handed_back import results_of
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.runtime.sampling import RESULT_WORDS
from tests.support import SMALL, raising, small_llm


@pytest.fixture(scope="module")
def loaded():
    return small_llm("qwen3").loaded


def _donated(loaded):
    """What each half of a step writes in place."""
    pools = loaded.layout.pools
    return {Bucket: (*pools.flat_caches(), pools.hidden), RowBucket: (pools.slots, pools.prompts)}


def _handed_back(loaded, part):
    """Results that a half writes where earlier ones lay."""
    layout = loaded.layout
    return results_of(part, layout.pools, layout.options, layout.mesh)


def _halves(loaded):
    return [*loaded.executables.forwards.items(), *loaded.executables.samples.items()]


def test_there_is_one_forward_for_each_bucket_and_one_sample_for_each_row_bucket(loaded):
    ladder = loaded.layout.ladder
    assert tuple(loaded.executables.forwards) == ladder.buckets
    assert [bucket.num_rows for bucket in loaded.executables.samples] == [1, 2, 4]


def test_all_that_a_half_gives_lies_where_its_arguments_lay(loaded):
    for bucket, executable in _halves(loaded):
        donated = (*_donated(loaded)[type(bucket)], *_handed_back(loaded, bucket))
        header = executable.as_text().split("\n", 1)[0]
        assert header.count("may-alias") + header.count("must-alias") == len(donated), str(bucket)
        num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in donated)
        assert executable.memory_analysis().alias_size_in_bytes == num_bytes, str(bucket)


def test_no_step_copies_a_pool(loaded):
    """Under no shape: what has as many elements as a pool or more is a pool, the rest of a step is small."""
    pools = loaded.layout.pools
    arrays = {Bucket: pools.flat_caches(), RowBucket: (pools.slots, pools.prompts)}
    for bucket, executable in _halves(loaded):
        least = min(math.prod(array.shape) for array in arrays[type(bucket)])
        copies = re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", executable.as_text())
        assert copies, "the pattern finds no copy at all"
        sizes = {shape: math.prod(map(int, shape.split(","))) for shape in copies if shape}
        assert {shape for shape, size in sizes.items() if size >= least} == set(), str(bucket)


def test_logits_are_in_what_samples_alone(loaded):
    vocabulary = loaded.layout.options.spec.vocab_size
    for bucket, executable in _halves(loaded):
        assert bool(re.search(rf"f32\[\d+,{vocabulary}\]", executable.as_text())) == isinstance(bucket, RowBucket)


def test_a_slot_is_written_in_place(loaded):
    slots = loaded.layout.pools.slots
    analysis = loaded.executables["write_slot"].memory_analysis()
    assert analysis.alias_size_in_bytes == math.prod(slots.shape) * slots.dtype.itemsize


def test_blocks_are_copied_in_place(loaded):
    executable = loaded.executables["copy_blocks"]
    pools = loaded.layout.pools.flat_caches()
    pool_bytes = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
    assert executable.memory_analysis().alias_size_in_bytes == pool_bytes
    assert executable.memory_analysis().temp_size_in_bytes < pool_bytes / 20
    shape = ",".join(map(str, pools[0].shape))
    assert f"[{shape}]" in executable.as_text() and not re.findall(rf"\[{shape}\]\S* copy\(", executable.as_text())


def test_temporaries_of_a_step_are_smaller_than_one_pool(loaded):
    pool_bytes = math.prod(loaded.layout.pools.flat_caches()[0].shape) * loaded.layout.dtype.itemsize
    for bucket, executable in _halves(loaded):
        assert executable.memory_analysis().temp_size_in_bytes < pool_bytes, str(bucket)


def test_a_step_gives_the_host_one_array_of_a_few_words_a_row(loaded, monkeypatch):
    """Prompt log-probabilities are the other result; without a request for them none are computed."""
    fetched = []
    rows = InFlight.rows
    monkeypatch.setattr(Runner, "score", raising(AssertionError("prompt log-probabilities are computed")))
    monkeypatch.setattr(InFlight, "rows", lambda step: fetched.append(rows(step)) or fetched[-1])
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
    small_llm("qwen3").generate([[7] * 20, [9]], params, progress=False)
    assert {(a.dtype.name, a.shape[1]) for a in fetched} == {("int32", RESULT_WORDS)}
    assert all(len(a) <= SMALL.max_num_seqs for a in fetched)
