"""What a mask does not allow is never drawn, whatever else a row asks for; rows without one draw as ever."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.sampling import ALL, sample, unpack, write_masks
from tests.oracles import sampling as oracle
from tests.sampling.rows import ROWS, Row, V, pool_of, random_logits, step

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
