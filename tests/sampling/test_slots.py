"""The pool of row records: what is written at admission, appended by a step, read by the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.asked.sampling import MAX_LOGIT_BIAS, SamplingParams
from ferrum_jax.sampling import RECORD_WORDS, append_tokens, read_tokens, sample, slot_record, write_slot
from ferrum_jax.sampling.record_words import BIAS_VALUES, FLAGS, STOP_IDS
from tests.sampling.rows import MAX_LEN, Row, V, null_slots


def test_a_record_written_to_a_slot_changes_no_other_slot():
    slots = jax.jit(write_slot, donate_argnums=0)(null_slots(3, MAX_LEN), jnp.int32(2), Row(output=(8, 9)).record())
    expected = np.zeros((4, RECORD_WORDS + MAX_LEN), np.int32)
    expected[2] = Row(output=(8, 9)).record()
    np.testing.assert_array_equal(np.asarray(slots), expected)


def test_a_token_is_appended_where_it_is_read_and_inactive_rows_write_nothing():
    slots = null_slots(3, MAX_LEN)
    row_slots, positions = jnp.array([3, 1, 0], jnp.int32), jnp.array([MAX_LEN - 1, 4, 0], jnp.int32)
    tokens = jnp.array([70, 80, 90], jnp.int32)
    append = jax.jit(append_tokens, donate_argnums=0)
    slots = append(slots, row_slots, positions, tokens, jnp.array([True, True, False]))
    assert read_tokens(slots, row_slots, positions).tolist() == [70, 80, 0]
    assert int(jnp.sum(slots != 0)) == 2


def test_appending_and_writing_under_donation_keep_the_pool_in_place():
    pool = jax.ShapeDtypeStruct((65, RECORD_WORDS + 4096), jnp.int32)
    rows = jax.ShapeDtypeStruct((64,), jnp.int32)
    active = jax.ShapeDtypeStruct((64,), bool)
    size = 65 * (RECORD_WORDS + 4096) * 4
    for compiled in (
        jax.jit(append_tokens, donate_argnums=0).lower(pool, rows, rows, rows, active).compile(),
        jax.jit(write_slot, donate_argnums=0)
        .lower(pool, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(pool.shape[1:], jnp.int32))
        .compile(),
    ):
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size // 8


def test_a_record_that_asks_for_nothing_has_no_flags_and_a_full_one_fits():
    assert Row().record()[FLAGS] == 0
    bias = {token: token / 10 for token in range(MAX_LOGIT_BIAS)}
    record = Row(
        sampling=SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=3), stop_ids=tuple(range(100, 132))
    ).record()
    values = record[BIAS_VALUES : BIAS_VALUES + MAX_LOGIT_BIAS].view(np.float32)
    np.testing.assert_array_equal(values, np.float32(list(bias.values())))
    assert record[STOP_IDS:RECORD_WORDS].tolist() == list(range(100, 132))


def test_what_does_not_fit_a_record_is_refused_with_both_numbers():
    wish = {"seed": 0, "choice": 0, "num_prompt_tokens": 5, "max_model_len": 4}
    with pytest.raises(ValueError, match="5 tokens do not fit in max_model_len, 4"):
        slot_record(SamplingParams(), stop_ids=(), token_ids=[1] * 5, **wish)
    with pytest.raises(ValueError, match="33 end tokens"):
        slot_record(SamplingParams(), stop_ids=range(33), token_ids=[1], **wish)


def test_a_step_that_samples_with_everything_and_appends_copies_no_pool():
    def step(logits, slots, row_slots, positions, active):
        sampled = sample(logits, slots, row_slots, positions, active)
        return append_tokens(slots, row_slots, positions, sampled.token_ids, active), sampled.result

    pool = jax.ShapeDtypeStruct((9, RECORD_WORDS + 5000), jnp.int32)
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    logits, active = jax.ShapeDtypeStruct((8, V), jnp.float32), jax.ShapeDtypeStruct((8,), bool)
    compiled = jax.jit(step, donate_argnums=1).lower(logits, pool, rows, rows, active).compile()
    shape = f"s32[9,{RECORD_WORDS + 5000}]"
    assert [line for line in compiled.as_text().splitlines() if " copy(" in line and shape in line] == []
    assert compiled.memory_analysis().alias_size_in_bytes == 9 * (RECORD_WORDS + 5000) * 4
