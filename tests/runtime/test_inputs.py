"""A plan crosses to the device in an int32 array for each half of a step, whole; what is padding is null."""

import dataclasses

import jax
import numpy as np
import pytest

from ferrum_jax.core.plan import ImageTokensPlan, ShardPlan
from ferrum_jax.runtime import inputs as laid_out
from ferrum_jax.runtime.buckets import Bucket
from ferrum_jax.sampling_params import MAX_NAMED_IDS

BUCKET = Bucket(num_tokens=16, num_rows=5, table_width=6, decode_only=False)
ROW_FIELDS = ("slots", "starts", "counts", "state_slots", "source_slots", "target_slots", "adapter_ids", "rope_shifts")
ROW_FIELDS = (*ROW_FIELDS, "clip_slots")
OF_TOKENS = {"image_slots", "seen_ends", "rope_positions"}


def drawing(rows: int) -> dict[str, np.ndarray]:
    """Every other row draws under a mask."""
    return {"samples": np.ones(rows, np.int32), "masked": np.arange(rows) % 2 == 0}


def make_plan(rows: int) -> ShardPlan:
    """Rows of a model with two cache groups, recurrent state and last-token slots; every number another."""
    numbers = iter(range(1, 10_000))

    def take(*shape: int) -> np.ndarray:
        return np.array([next(numbers) for _ in range(int(np.prod(shape)))], np.int32).reshape(shape)

    return ShardPlan(
        **{field: take(rows) for field in ROW_FIELDS},
        **drawing(rows),
        block_tables=(take(rows, 4), take(rows, 6)),
    )


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_every_field_of_a_plan_arrives_and_padding_is_null(rows):
    plan = make_plan(rows)
    forward, sample = (
        laid_out.unpack_forward(laid_out.pack_forward([plan], BUCKET), BUCKET, 2),
        laid_out.unpack_sample(laid_out.pack_sample([plan], 5), 5),
    )
    assert sample.num_rows == rows
    computed = {"positions": plan.starts + plan.counts, "places": np.cumsum(plan.counts) - 1}
    for inputs in (forward, sample):
        for field in vars(inputs).keys() - {"num_rows", "block_tables", *OF_TOKENS}:
            np.testing.assert_array_equal(
                getattr(inputs, field)[:rows], computed.get(field, getattr(plan, field, None))
            )
            assert not np.any(getattr(inputs, field)[rows:]), f"{field} of padding rows"
    for table, packed in zip(plan.block_tables, forward.block_tables, strict=True):
        assert packed.shape == (5, 6)
        np.testing.assert_array_equal(packed[:rows, : table.shape[1]], table)
        assert not np.any(packed[rows:]) and not np.any(packed[:, table.shape[1] :])


def test_tokens_of_images_arrive_and_a_shard_without_has_the_positions_of_its_rows():
    bucket = dataclasses.replace(BUCKET, imaged=True)
    rows = {field: np.zeros(2, np.int32) for field in ROW_FIELDS} | drawing(2)
    rows |= {"starts": np.array([7, 3], np.int32), "counts": np.array([1, 4], np.int32)}
    text = ShardPlan(**rows | {"rope_shifts": np.array([-5, 2], np.int32)}, block_tables=())
    images = ImageTokensPlan(
        slots=np.array([0, 16, 17, 0, 0]), positions=np.arange(15).reshape(3, 5), ends=np.array([0, 9, 9, 0, 0])
    )
    blob = laid_out.pack_forward([text, ShardPlan(**rows, block_tables=(), images=images)], bucket)
    plain, imaged = (laid_out.unpack_forward(part, bucket, 0) for part in np.split(blob, 2))
    np.testing.assert_array_equal(plain.rope_positions[:, :5], np.tile([2, 5, 6, 7, 8], (3, 1)))
    assert not np.any(plain.image_slots) and not np.any(plain.seen_ends)
    np.testing.assert_array_equal(imaged.rope_positions[:, :5], images.positions)
    np.testing.assert_array_equal(imaged.image_slots, [0, 16, 17, *[0] * 13])
    np.testing.assert_array_equal(imaged.seen_ends, [0, 9, 9, *[0] * 13])


def test_rows_of_two_shards_are_sampled_in_a_smaller_bucket_than_the_forward_s():
    plans = [make_plan(1), make_plan(2)]
    blob = laid_out.pack_sample(plans, 2).reshape(2, laid_out.sample_words(2))
    for plan, part in zip(plans, blob, strict=True):
        np.testing.assert_array_equal(laid_out.unpack_sample(part, 2).slots[: plan.num_rows], plan.slots)


def test_a_row_that_computes_nothing_has_a_place_within_the_step():
    plan = dataclasses.replace(make_plan(2), counts=np.array([0, 0], np.int32))
    assert laid_out.unpack_sample(laid_out.pack_sample([plan], 2), 2).places.tolist() == [0, 0]


def test_a_row_with_drafts_draws_behind_each_of_them():
    """Three rows: tokens 7 to 9 with two drafts, tokens 4 and 5 that draw nothing, and token 20."""
    plan = dataclasses.replace(
        make_plan(3),
        slots=np.array([5, 6, 7], np.int32),
        starts=np.array([7, 4, 20], np.int32),
        counts=np.array([3, 2, 1], np.int32),
        samples=np.array([3, 0, 1], np.int32),
        target_slots=np.array([9, 0, 8], np.int32),
        source_slots=np.zeros(3, np.int32),
        drafts=(70, 71),
    )
    inputs = laid_out.unpack_sample(laid_out.pack_sample([plan], 8), 8)
    assert inputs.num_rows == plan.num_places == 5 and plan.first_places.tolist() == [0, 3, 4]
    assert inputs.slots.tolist() == [5, 5, 5, 6, 7, 0, 0, 0]
    assert inputs.positions.tolist() == [8, 9, 10, 6, 21, 0, 0, 0]
    assert inputs.places.tolist() == [0, 1, 2, 4, 5, 0, 0, 0]
    assert inputs.samples.tolist() == [1, 1, 1, 0, 1, 0, 0, 0]
    assert inputs.target_slots.tolist() == [9, 0, 0, 0, 8, 0, 0, 0], "of the last token that is known"
    assert inputs.mask_ids.tolist() == [1, 2, 3, 0, 5, 0, 0, 0], "each place has a mask of its own"
    rows, positions, tokens = laid_out.pack_drafts([plan], 4, 99).reshape(3, 4)
    assert (rows.tolist(), positions.tolist(), tokens.tolist()) == ([5, 5, 99, 99], [8, 9, 0, 0], [70, 71, 0, 0])


def test_tokens_that_are_scored_arrive_with_those_that_follow():
    parts = [np.array([[3, 4], [70, 80], [1, 2], [9, 5]], np.int32), np.zeros((4, 0), np.int32)]
    named = [np.full((2, MAX_NAMED_IDS), 6, np.int32), np.zeros((0, MAX_NAMED_IDS), np.int32)]
    first, second = laid_out.pack_score(parts, 4, tops=True, named=named).reshape(2, laid_out.score_words(4))
    inputs = laid_out.unpack_score(first, 4)
    assert int(inputs.names) == 1 and inputs.named[:, -1].tolist() == [6, 6, 0, 0]
    assert (inputs.places.tolist(), inputs.following.tolist(), int(inputs.tops)) == ([3, 4, 0, 0], [70, 80, 0, 0], 1)
    assert (inputs.slots.tolist(), inputs.positions.tolist()) == ([1, 2, 0, 0], [9, 5, 0, 0])
    assert second.tolist() == [1, 1] + [0] * 4 * (4 + MAX_NAMED_IDS)
    assert not int(laid_out.unpack_score(laid_out.pack_score(parts[:1], 4, tops=True), 4).names)


@pytest.mark.parametrize(
    ("words", "unpack"),
    [
        (laid_out.forward_words(BUCKET, 2), lambda blob: laid_out.unpack_forward(blob, BUCKET, 2)),
        (laid_out.sample_words(5), lambda blob: laid_out.unpack_sample(blob, 5)),
        (laid_out.score_words(7), lambda blob: laid_out.unpack_score(blob, 7)),
    ],
)
def test_every_word_of_an_array_belongs_to_one_field(words, unpack):
    found = np.concatenate([np.ravel(part) for part in jax.tree.leaves(vars(unpack(np.arange(words, dtype=np.int32))))])
    np.testing.assert_array_equal(np.sort(found), np.arange(words))


def test_two_steps_never_share_an_array():
    """The step in flight may still read the array of the step before."""
    plan = make_plan(2)
    assert not np.shares_memory(laid_out.pack_forward([plan], BUCKET), laid_out.pack_forward([plan], BUCKET))
    assert not np.shares_memory(laid_out.pack_sample([plan], 5), laid_out.pack_sample([plan], 5))
