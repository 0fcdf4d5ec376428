"""A time is drawn wherever all times together are more likely than each word; other rows draw as ever."""

import numpy as np

from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.sampling_params import SamplingParams
from tests.sampling.rows import ROWS, Row, V, pool_of, random_logits, step

FIRST = 60
TIMED = Transcript(end_id=50, stamps_from=FIRST)


def drawn(sampling: SamplingParams, logits: np.ndarray) -> np.ndarray:
    rows = [Row()] + [Row(sampling=sampling, seed=seed) for seed in range(1, ROWS)]
    slots, positions = np.arange(ROWS, dtype=np.int32), np.array([row.position for row in rows], np.int32)
    found = step(logits, pool_of(rows[1:], list(range(1, ROWS))), slots, positions, np.ones(ROWS, bool))
    return np.asarray(found.token_ids)[1:]


def test_times_are_drawn_where_all_of_them_outweigh_each_word():
    logits = random_logits(ROWS, V)
    logits[:, :FIRST] += np.linspace(0, 8, ROWS, dtype=np.float32)[:, None]
    exact = logits.astype(np.float64)[1:]
    outweigh = np.log(np.exp(exact[:, FIRST:]).sum(axis=1)) > exact[:, :FIRST].max(axis=1)
    assert 20 < outweigh.sum() < ROWS - 20
    found = drawn(SamplingParams(temperature=0.0, transcript=TIMED), logits)
    np.testing.assert_array_equal(
        found, np.where(outweigh, FIRST + exact[:, FIRST:].argmax(axis=1), exact.argmax(axis=1))
    )
    plain = drawn(SamplingParams(temperature=0.0), logits)
    np.testing.assert_array_equal(plain, exact.argmax(axis=1))


def test_draws_by_chance_follow_the_same_rule():
    logits = random_logits(ROWS, V)
    outweigh = np.log(np.exp(logits[1:, FIRST:].astype(np.float64)).sum(axis=1)) > logits[1:, :FIRST].max(axis=1)
    found = drawn(SamplingParams(temperature=1.0, transcript=TIMED), logits)
    assert outweigh.any() and (found[outweigh] >= FIRST).all()
    assert (found[~outweigh] < FIRST).any()
