"""What a mask does not allow is never drawn, whatever else a row asks for; rows without one draw as ever.

Log-probabilities: of the model's own distribution, for chosen tokens and for prompts.

The pool of row records: what is written at admission, appended by a step, read by the next.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.runtime.sampling import (
    ALL,
    RECORD_WORDS,
    append_tokens,
    read_tokens,
    row_results,
    sample,
    slot_record,
    unpack,
    write_masks,
    write_slot,
)
from ferrum_jax.runtime.sampling.record_words import BIAS_VALUES, FLAGS, STOP_IDS
from ferrum_jax.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from pallas_kernels.tolerance import TOLERANCE
from tests.oracles import sampling as oracle
from tests.sampling.rows import MAX_LEN, ROWS, Row, V, null_slots, pool_of, random_logits, run, step

WORDS = -(-V // 32)
ALLOWED = (3, 31, 32, 63, 64, 96)
WISHES = [
    {"temperature": 0.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {3: -50.0}},
    {"temperature": 0.0, "logprobs": 8},
]


def drawn(rows: list[Row], logits: np.ndarray, mask_ids: np.ndarray | None, allowed=ALLOWED) -> np.ndarray:
    """[rows, words] results; mask 2 allows `allowed` alone."""
    masks = np.full((3, WORDS), ALL, np.int32)
    masks[2] = np.packbits(np.isin(np.arange(32 * WORDS), allowed), bitorder="little").view(np.int32)
    slots = np.arange(ROWS, dtype=np.int32)
    positions = np.array([row.position for row in rows], np.int32)
    ids = () if mask_ids is None else (mask_ids, masks)
    found = step(logits, pool_of(rows[1:], list(range(1, ROWS))), slots, positions, np.ones(ROWS, bool), *ids)
    return np.asarray(found.result)


@pytest.mark.parametrize("wishes", WISHES, ids=lambda wishes: "+".join(wishes))
def test_rows_with_a_mask_draw_what_it_allows_and_others_draw_as_ever(wishes):
    rows = [Row()] + [Row(sampling=SamplingParams(**wishes), seed=seed) for seed in range(1, ROWS)]
    logits, mask_ids = random_logits(ROWS, V), np.where(np.arange(ROWS) % 3 == 1, 2, 0).astype(np.int32)
    found, without = drawn(rows, logits, mask_ids), drawn(rows, logits, None)
    masked = mask_ids == 2
    assert set(found[masked, 0]) <= set(ALLOWED) and len(set(found[masked, 0])) > 3
    np.testing.assert_array_equal(found[~masked], without[~masked])


def test_log_probabilities_are_those_of_the_tokens_that_are_allowed():
    rows = [Row()] + [Row(sampling=SamplingParams(temperature=0.0, logprobs=8))] * (ROWS - 1)
    logits = random_logits(ROWS, V)
    found = unpack(drawn(rows, logits, np.full(ROWS, 2, np.int32)))
    exact = logits[:, ALLOWED].astype(np.float64)
    exact = exact - np.log(np.sum(np.exp(exact), axis=1, keepdims=True))
    np.testing.assert_allclose(found.logprobs[1:], exact.max(axis=1)[1:], rtol=1e-5, atol=1e-5)
    assert (found.ranks[1:] == 1).all() and set(found.top_ids[1:, : len(ALLOWED)].flatten()) == set(ALLOWED)
    assert np.isneginf(found.top_logprobs[1:, len(ALLOWED) : 8]).all()


def test_masks_are_written_in_place_and_ids_beyond_the_pool_write_nothing():
    pool = jnp.full((4, WORDS), ALL, jnp.int32)
    rows = np.arange(3 * WORDS, dtype=np.int32).reshape(3, WORDS)
    written = jax.jit(write_masks, donate_argnums=0)(pool, np.array([2, 4, 1], np.int32), rows)
    assert np.asarray(written).tolist() == [[ALL] * WORDS, rows[2].tolist(), rows[0].tolist(), [ALL] * WORDS]


def test_what_could_be_drawn_is_what_the_oracle_keeps_or_the_token_alone():
    """Rows of every wish at once; the oracle computes in float64, so logits that a threshold could split are apart."""
    wishes = [SamplingParams(**each) for each in (*WISHES, {"temperature": 0.7, "top_p": 0.5}, {"min_p": 0.2})]
    rows = [Row()] + [Row(sampling=wishes[i % len(wishes)], seed=i, output=(4, 5, 4)) for i in range(1, ROWS)]
    logits = np.argsort(np.argsort(random_logits(ROWS, V), axis=1), axis=1).astype(np.float32) / 8
    ids = np.full(ROWS, 0, np.int32), np.full((3, WORDS), ALL, np.int32)
    slots, positions = np.arange(ROWS, dtype=np.int32), np.array([row.position for row in rows], np.int32)
    pool = pool_of(rows[1:], list(range(1, ROWS)))
    gives = jax.jit(sample, static_argnames="gives_masks")
    found = gives(logits, pool, slots, positions, np.ones(ROWS, bool), *ids, gives_masks=True)
    plain = step(logits, pool, slots, positions, np.ones(ROWS, bool))
    np.testing.assert_array_equal(found.result, plain.result)
    masks = np.unpackbits(np.asarray(found.drawable).view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert masks.shape == (ROWS, 32 * WORDS) and not masks[:, V:].any()
    for i, row in enumerate(rows):
        edited = oracle.edited_logits(logits[i], row.sampling, row.prompt, row.output, row.stop_ids)
        noisy = row.sampling.temperature > 0
        wanted = oracle.kept_probabilities(edited, row.sampling) > 0 if noisy else np.arange(V) == plain.token_ids[i]
        np.testing.assert_array_equal(masks[i, :V], wanted)


def test_logprobs_are_those_of_the_model_before_bias_penalties_and_temperature():
    wish = SamplingParams(temperature=0.3, top_k=2, logit_bias={9: 50.0}, repetition_penalty=2.0, logprobs=5)
    logits = random_logits(2, V)
    tokens, read = run([Row(sampling=wish), Row(sampling=SamplingParams(temperature=0.0, logprobs=0))], logits)
    for i in range(2):
        expected, token = oracle.log_softmax(logits[i]), int(tokens[i])
        assert read.token_ids[i] == token
        assert read.ranks[i] == oracle.rank(logits[i], token)
        np.testing.assert_allclose(read.logprobs[i], expected[token], **TOLERANCE["float32"])
        np.testing.assert_array_equal(read.top_ids[i], oracle.top_ids(logits[i], MAX_LOGPROBS))
        np.testing.assert_allclose(read.top_logprobs[i], np.sort(expected)[::-1][:MAX_LOGPROBS], **TOLERANCE["float32"])
    assert int(tokens[0]) == 9


def test_what_nobody_asked_for_is_zero():
    _, read = run([Row()], random_logits(1, V))
    assert not read.ranks.any() and not read.logprobs.any() and not read.top_ids.any()
    _, read = run([Row(sampling=SamplingParams(logprobs=0))], random_logits(1, V))
    assert read.ranks.all() and not read.top_ids.any()


def test_a_rows_entries_are_the_chosen_token_and_the_most_likely_ones():
    logits = random_logits(1, V)
    wish = SamplingParams(temperature=0.0, logprobs=3, logit_bias={int(logits[0].argmin()): 100.0})
    _, read = run([Row(sampling=wish)], logits)
    entries = read.row(0, 3)
    assert list(entries) == [int(logits[0].argmin()), *oracle.top_ids(logits[0], 3).tolist()]
    assert [entry.rank for entry in entries.values()] == [V, 1, 2, 3]


def test_a_vocabulary_smaller_than_the_most_alternatives_reports_what_there_is():
    asked = jnp.bool_(True)
    logits = random_logits(1, 7)
    packed = jax.jit(lambda: row_results(lambda: logits, np.array([3], np.int32), wanted=asked, tops_wanted=asked))()
    assert len(unpack(np.asarray(packed)).row(0, 20)) == 7


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
