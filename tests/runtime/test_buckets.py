"""The ladder: every step has a bucket, the smallest that holds it."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.cli.benchmarks.workloads import make_workload
from ferrum_jax.config import EngineConfig
from ferrum_jax.core.plan import ShardPlan, StepPlan
from ferrum_jax.core.scheduler.request_log import LoggedChoice, LoggedRequest, Segment
from ferrum_jax.inputs.sizes.engine_sizes import EngineSizes, Reach
from ferrum_jax.io.ints import ceil_div
from ferrum_jax.planning.offline.replay import padding_of, replay
from ferrum_jax.runtime.buckets import FIRST_TOKENS, RowBucket, choose_table_width, make_ladder, most_places

fixed = settings(max_examples=60)


@st.composite
def limits(draw) -> dict[str, int]:
    """Limits of an engine, and a step within them."""
    seqs = draw(st.integers(1, 300))
    return {"max_num_seqs": seqs, "max_num_batched_tokens": draw(st.integers(seqs, 3000))}


@fixed
@given(limits(), st.booleans(), st.data())
def test_a_step_within_the_limits_gets_the_smallest_bucket_that_holds_it(limits, invariant, data):
    ladder = make_ladder(**limits, table_width=8, invariant=invariant)
    rows = data.draw(st.integers(1, limits["max_num_seqs"]))
    most = st.integers(0, limits["max_num_batched_tokens"])
    tokens = data.draw(st.one_of(st.just(rows), most))  # rows that sample from a prompt slot compute none
    longest = data.draw(st.integers(ceil_div(tokens, rows), tokens))
    found = ladder.find(num_tokens=tokens, num_rows=rows, longest=longest)
    holding = [
        b
        for b in ladder.buckets
        if b.num_tokens >= tokens and b.num_rows >= rows and (longest <= 1 or not b.decode_only)
    ]
    assert found in holding and found.num_tokens == min(b.num_tokens for b in holding)
    assert not found.decode_only or longest <= 1, "decode buckets are for at most one token a row"


@fixed
@given(limits(), st.booleans())
def test_buckets_are_all_different_and_at_most_double_from_one_to_the_next(limits, invariant):
    ladder = make_ladder(**limits, table_width=8, invariant=invariant)
    assert len(set(ladder.buckets)) == len(ladder.buckets)
    for decode in (True, False):
        sizes = [b.num_tokens for b in ladder.buckets if b.decode_only is decode]
        assert sizes == sorted(sizes) and all(b <= 2 * a for a, b in itertools.pairwise(sizes))


@fixed
@given(limits())
def test_invariant_buckets_hold_at_least_64_tokens_and_rows(limits):
    ladder = make_ladder(**limits, table_width=8, invariant=True)
    assert all(b.num_tokens >= 64 and b.num_rows >= 64 and not b.decode_only for b in ladder.buckets)


@fixed
@given(limits())
def test_a_decode_bucket_has_a_token_a_row_and_a_mixed_one_all_rows(limits):
    for bucket in make_ladder(**limits, table_width=8, invariant=False).buckets:
        assert bucket.num_rows == (bucket.num_tokens if bucket.decode_only else limits["max_num_seqs"])


def test_the_ladder_of_four_rows_and_sixteen_tokens():
    ladder = make_ladder(max_num_seqs=4, max_num_batched_tokens=16, table_width=8, invariant=False)
    assert [str(b) for b in ladder.buckets] == [
        "decode T=1 R=1 M=8",
        "decode T=2 R=2 M=8",
        "decode T=4 R=4 M=8",
        "mixed T=16 R=4 M=8",
    ]


def test_nothing_samples_more_rows_than_a_step_has():
    ladder = make_ladder(max_num_seqs=9, max_num_batched_tokens=16, table_width=8, invariant=False, accelerator=True)
    assert [bucket.num_rows for bucket in ladder.buckets if bucket.decode_only] == [8, 16]
    assert [bucket.num_rows for bucket in ladder.row_buckets] == [8, 9]


def test_a_step_beyond_the_limits_is_a_broken_invariant():
    ladder = make_ladder(max_num_seqs=4, max_num_batched_tokens=16, table_width=8, invariant=False)
    with pytest.raises(AssertionError, match="no bucket holds 17 tokens in 2 rows"):
        ladder.find(num_tokens=17, num_rows=2, longest=16)


@fixed
@given(limits(), st.booleans(), st.booleans(), st.data())
def test_a_reach_leaves_out_what_no_step_of_its_requests_takes_and_nothing_else(limits, invariant, accelerator, data):
    options = {**limits, "table_width": 8, "invariant": invariant, "accelerator": accelerator}
    reach = Reach(num_rows=data.draw(st.integers(1, 400)), num_tokens=data.draw(st.integers(1, 4000)))
    full, short = make_ladder(**options), make_ladder(**options, reach=reach)
    assert set(short.buckets) <= set(full.buckets)
    rows = data.draw(st.integers(1, min(limits["max_num_seqs"], reach.num_rows)))
    tokens = data.draw(st.integers(0, min(limits["max_num_batched_tokens"], reach.num_tokens)))
    step = {"num_tokens": tokens, "num_rows": rows, "longest": ceil_div(tokens, rows)}
    assert short.find(**step) == full.find(**step)
    for before, bucket in itertools.pairwise([b for b in short.buckets if b.decode_only]):
        begins_with = not accelerator and bucket in full.first_parts(FIRST_TOKENS)  # as any other start does
        assert before.num_rows < reach.num_rows or begins_with, f"{bucket} is never taken"
    for before, bucket in itertools.pairwise([b for b in short.buckets if not b.decode_only]):
        assert before.num_tokens < max(reach.num_tokens, FIRST_TOKENS, bucket.num_rows), f"{bucket} is never taken"
    assert short.row_buckets[-1] == full.row_buckets[-1], "what samples all rows is there in any case"


@fixed
@given(st.integers(1, 50), st.integers(1, 10_000), st.booleans())
def test_a_start_for_known_requests_begins_with_what_any_other_start_begins_with(rows, tokens, invariant):
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 2048, "table_width": 8, "invariant": invariant}
    short = make_ladder(**options, reach=Reach(num_rows=rows, num_tokens=tokens))
    assert short.first_parts(FIRST_TOKENS) == make_ladder(**options).first_parts(FIRST_TOKENS)


@fixed
@given(st.integers(1, 50_000), st.sampled_from([16, 64, 128]), st.data())
def test_tables_are_as_wide_as_the_longest_request_needs_in_few_sizes(most, block_size, data):
    longest = data.draw(st.integers(1, most))
    width = choose_table_width(most, block_size, Reach(num_rows=1, num_tokens=1, request_tokens=longest))
    least = max(longest, 1024)
    assert longest <= width * block_size, "the request fits"
    assert (width - 1) * block_size < 4 * (least + 3 * block_size), "at most four times what is needed, or 1,024 tokens"
    assert choose_table_width(most, block_size, None) == ceil_div(most, block_size)


def test_an_accelerator_has_at_most_24_executables_by_default():
    config = EngineConfig()
    ladder = make_ladder(
        max_num_seqs=config.rows_on("tpu"),
        max_num_batched_tokens=config.max_num_batched_tokens,
        table_width=8,
        invariant=False,
        accelerator=True,
    )
    assert [b.num_tokens for b in ladder.buckets if b.decode_only] == [8, 16, 32, 64, 128, 256]
    mixed = [b.num_tokens for b in ladder.buckets if not b.decode_only]
    assert mixed == [128, 256, 384, 512, 768, 1024, 1536, 2048]


@pytest.mark.parametrize("max_num_seqs", [8, 16, 64, 256])
def test_less_than_a_fifth_of_the_slots_of_ragged_requests_is_padding(max_num_seqs):
    """As `ferrum-jax bench --workload ragged` has them; where bits are invariant, few rows waste more of 64 slots."""
    sizes = EngineSizes(
        block_size=16,
        group_blocks=[4096],
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=2048,
    )
    requests = [
        LoggedRequest(
            id=number,
            arrival=0,
            prompt_token_ids=ids,
            max_tokens=count,
            choices=[LoggedChoice(token_ids=[0] * count, finish_reason="length")],
        )
        for number, (ids, count) in enumerate(make_workload("ragged", 1000, seed=1))
    ]
    plans = []
    replay([Segment(sizes=sizes, requests=requests)], 4096, on_plan=plans.append)
    for accelerator in (False, True):
        ladder = make_ladder(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            table_width=128,
            invariant=False,
            accelerator=accelerator,
        )
        assert 0 < padding_of(plans, ladder) < 0.2


def drafted_plan(*drafts: int, known: int = 1) -> StepPlan:
    """A step of rows with so many drafts each, behind `known` tokens that are known."""
    counts, samples = np.array(drafts, np.int32) + known, np.array(drafts, np.int32) + 1
    zeros = np.zeros(len(drafts), np.int32)
    fields = ("state_slots", "source_slots", "target_slots", "adapter_ids", "rope_shifts", "clip_slots")
    shard = ShardPlan(
        slots=1 + np.arange(len(drafts), dtype=np.int32),
        starts=10 * (1 + np.arange(len(drafts), dtype=np.int32)),
        counts=counts,
        samples=samples,
        masked=zeros > 0,
        block_tables=(np.arange(len(drafts), dtype=np.int32)[:, None],),
        drafts=tuple(range(sum(drafts))),
        **dict.fromkeys(fields, zeros),
    )
    return StepPlan(step=1, shards=(shard,))


def test_a_step_with_drafts_fits_a_decode_bucket_as_rows_of_one_token():
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "table_width": 4, "invariant": False}
    ladder = dataclasses.replace(make_ladder(**sizes), num_places=64, spreads=True)
    plan = drafted_plan(2, 0, 1)
    (shard,), bucket = ladder.laid_out(plan)[0].shards, ladder.laid_out(plan)[1]
    assert bucket.decode_only and bucket.num_tokens == 8
    assert shard.slots.tolist() == [1, 1, 1, 2, 3, 3] and shard.starts.tolist() == [10, 11, 12, 20, 30, 31]
    assert shard.counts.tolist() == [1] * 6 and shard.block_tables[0][:, 0].tolist() == [0, 0, 0, 1, 2, 2]
    assert ladder.row_bucket_of(plan).num_rows == 8, "places are the same"
    assert not ladder.laid_out(drafted_plan(5, 5))[1].decode_only, "no decode bucket holds twelve tokens"
    assert ladder.laid_out(drafted_plan(2, known=2))[1].num_tokens == 16, "what is computed again is a chunk"
    chunks = dataclasses.replace(ladder, spreads=False)
    assert chunks.laid_out(plan)[1].num_tokens == 16


def test_places_reach_beyond_rows_where_tokens_cost_little():
    ladder = make_ladder(max_num_seqs=8, max_num_batched_tokens=1024, table_width=4, invariant=False)
    places = most_places(8, 1024, accelerator=False)
    assert ladder.row_buckets[-1].num_rows == 8
    drafting = dataclasses.replace(ladder, num_places=places)
    assert [b.num_rows for b in drafting.row_buckets] == [1, 2, 4, 8, 16, 32, 64]
    assert [part for part in drafting.first_parts(128) if part in drafting.row_buckets] == [
        RowBucket(num_rows=8),
        RowBucket(num_rows=64),
    ]
    assert most_places(8, 1024, accelerator=True) == 256
    assert (most_places(300, 1024, accelerator=True), most_places(8, 16, accelerator=True)) == (300, 16)
