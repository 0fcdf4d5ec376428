"""With invariant=True a request's logits have the same bits whatever runs beside it and however it is cut.

The 20 best log-probabilities of each generated token, and those of prompt tokens, stand for the logits.
"""

import dataclasses

import numpy as np
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.runtime.buckets import Ladder
from tests.golden_table import TABLE, goldens
from tests.support import FAMILIES, INVARIANT, QUANTISED, answers, fresh_engine, peek, requests_of, run, small_llm
from tests.support import logprobs_of as bits

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=20)
LENGTHS = (1, 17, 70, 33, 5)
FAST = goldens("ladder", "fast") + goldens("bits", "fast")
ALL_BUCKETS = goldens("buckets", "slow")  # of the others only by hand: a minute or two each
MANY_ROWS = dataclasses.replace(INVARIANT, max_num_seqs=64, num_blocks=512)


@pytest.fixture(
    scope="module",
    params=[f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in (*FAMILIES, *QUANTISED)],
)
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def prompts(family) -> list[list[int]]:
    rng = np.random.default_rng(6)
    return [rng.integers(6, 96 if family in QUANTISED else 250, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(family, prompts):
    """Each prompt alone, without reuse."""
    llm = small_llm(family, INVARIANT)
    return [bits(run(llm, [p], PARAMS, enable_prefix_caching=False)[0]) for p in prompts]


@pytest.mark.parametrize(
    "sizes", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 6}], ids=["hits", "chunks", "preemption"]
)
def test_companions_chunks_hits_and_preemption_do_not_change_a_bit(family, prompts, expected, sizes):
    engine = fresh_engine(small_llm(family, INVARIANT), **sizes)
    for _ in range(2):
        assert [bits(o) for o in answers(engine, requests_of(prompts, PARAMS))] == expected
    metrics = engine.scheduler.metrics()
    assert metrics.hit_tokens > 0 or "num_blocks" in sizes
    assert bool(metrics.preemptions + metrics.refusals) == ("num_blocks" in sizes)


def test_a_prompt_s_log_probabilities_have_the_bits_of_tokens_that_were_drawn(family, prompts, expected):
    """Sample and score are two executables with one tile of rows."""
    llm = small_llm(family, INVARIANT)
    whole = [[*prompt, *(next(iter(row)) for row in found)] for prompt, found in zip(prompts, expected, strict=True)]
    outputs = run(llm, whole, dataclasses.replace(PARAMS, max_tokens=1, prompt_logprobs=20))
    for prompt, output, found in zip(prompts, outputs, expected, strict=True):
        scored = [
            {token: entry.logprob for token, entry in row.items()} for row in output.prompt_logprobs[len(prompt) :]
        ]
        assert scored == found


def test_going_on_after_an_interruption_does_not_change_a_bit(family, prompts, expected):
    llm = small_llm(family, INVARIANT)
    outputs = []
    for index, p in enumerate(prompts):
        first = fresh_engine(llm)
        half = first.add(p, PARAMS)
        for _ in range(2 + index):
            first.step()
        outputs += answers(fresh_engine(llm), [(p, PARAMS, RequestOptions(resume=peek(first, half).outputs))])
    assert [bits(o) for o in outputs] == expected


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("qwen3_moe", 128, marks=pytest.mark.slow),
        *(
            pytest.param(name, 2048, marks=[pytest.mark.slow, *([] if name in ALL_BUCKETS else [pytest.mark.long])])
            for name in (*TABLE, *QUANTISED)
        ),
    ],
)
def test_no_bucket_of_the_ladder_changes_a_bit(name, most, monkeypatch):
    """40 prompts with log-probabilities of all their tokens, in steps of 64 tokens, 128, and so on to the default."""
    llm = small_llm(name, dataclasses.replace(MANY_ROWS, max_num_batched_tokens=most))
    rng = np.random.default_rng(7)
    prompts = [rng.integers(6, llm.spec.vocab_size, n).tolist() for n in rng.integers(20, 100, 40)]
    assert sum(map(len, prompts)) >= most
    params = dataclasses.replace(PARAMS, max_tokens=3, prompt_logprobs=1)
    used = _record_buckets(monkeypatch)
    sizes = [bucket.num_tokens for bucket in llm.loaded.layout.ladder.buckets]
    expected: list = []
    for size in sizes:
        outputs = run(llm, prompts, params, max_num_batched_tokens=size)
        assert size in used
        found = [(prompt_bits(output), bits(output)) for output in outputs]
        expected = expected or found
        assert sum(a != b for a, b in zip(found, expected, strict=True)) == 0, f"rows differ in steps of {size} tokens"
    assert (sizes[0], sizes[-1]) == (64, most)


def prompt_bits(output) -> list[dict[int, float] | None]:
    """The same of the prompt's tokens; None for the first."""
    return [row and {token: entry.logprob for token, entry in row.items()} for row in output.prompt_logprobs]


def _record_buckets(monkeypatch) -> set[int]:
    """Tokens of the buckets in which steps run from now on."""
    used, bucket_of = set(), Ladder.bucket_of

    def record(ladder, plan):
        bucket = bucket_of(ladder, plan)
        used.add(bucket.num_tokens)
        return bucket

    monkeypatch.setattr(Ladder, "bucket_of", record)
    return used
