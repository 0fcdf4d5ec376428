"""The reference's tokens of every family, in all ways of reuse together."""

import itertools

import pytest

from tests.engine.test_goldens import check_again, golden_prompts
from tests.golden_table import TABLE, goldens, marked
from tests.support import INVARIANT, fresh_engine, small_llm

NAMES = goldens("reuse", "slow")
RECURRENT = goldens("recurrent")  # test_recurrent.py
# .ci/run sees each way of reuse of these with fewer tokens, or another shape.
FAST = goldens("reuse", "fast")
BY_HAND = tuple(name for name in TABLE if name not in (*FAST, *NAMES, *RECURRENT))


@pytest.mark.parametrize(
    "name", [*FAST, *(marked(name, "slow") for name in NAMES), *(marked(name, "long") for name in BY_HAND)]
)
def test_greedy_tokens_equal_the_reference_in_chunks_on_hits_and_after_preemption(name):
    """In blocks that hold NaN until they are written. The longest prompts are cut in three and share their head."""
    for num_blocks in (80, 18):
        engine = fresh_engine(small_llm(name, INVARIANT), num_blocks=num_blocks)
        check_again(engine, *golden_prompts(name))
        metrics = engine.scheduler.metrics()
        # where blocks are few, what is found again is what a preempted row left, which is no hit
        assert metrics.hits >= 5 if num_blocks == 80 else metrics.hits + metrics.resumed_tokens > 0
        assert bool(metrics.preemptions + metrics.evictions) == (num_blocks == 18)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*goldens("together"), *NAMES])
def test_tokens_are_the_references_for_any_chunks_preemption_and_tier(name):
    """All combinations, each prompt twice at once and then again with three tokens of its answer."""
    golden = [[values[i] for i in (2, 4, 5)] for values in golden_prompts(name)]  # prompts of 11, 64, 97 tokens
    for budget, num_blocks, host_cache_bytes in itertools.product((64, 7), (80, 8), (0, 1 << 22)):
        sizes = {
            "max_num_batched_tokens": budget,
            "num_blocks": num_blocks,
            "host_cache_bytes": host_cache_bytes,
        }
        engine = fresh_engine(small_llm(name, INVARIANT), **sizes)
        check_again(engine, *golden, copies=2, max_tokens=9)
        metrics = engine.scheduler.metrics()
        assert metrics.hits and metrics.saved_prefill_tokens, sizes
        assert metrics.preemptions + metrics.refusals + metrics.evictions or num_blocks == 80, sizes
        assert metrics.spilled_blocks or num_blocks == 80 or not host_cache_bytes, sizes
