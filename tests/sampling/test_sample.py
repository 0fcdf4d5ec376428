"""One step of sampling against the float64 oracle: each feature alone, all together, and what must not matter."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.core.outputs import NOT_FINITE
from ferrum_jax.runtime.sampling import draw, edits
from ferrum_jax.runtime.sampling.noise import gumbel, row_bits
from ferrum_jax.runtime.sampling.record_words import FLAGS, SEED_LOW
from ferrum_jax.runtime.sampling.slots import read_parameters
from ferrum_jax.sampling_params import SamplingParams
from pallas_kernels.tolerance import TOLERANCE
from tests.oracles import sampling as oracle
from tests.rows import rows_beside
from tests.sampling.rows import ROWS, Row, V, compiled_step, pool_of, random_logits, run, step

NOISE_ROWS = 4000
BIAS = {5: 9.0, 7: -100.0, 96: 3.5}
PENALTIES = {"repetition_penalty": 1.7, "presence_penalty": 1.2, "frequency_penalty": -0.4}


def test_a_greedy_row_takes_the_lowest_id_among_the_largest_logits():
    logits = np.zeros((2, V), np.float32)
    logits[1, [30, 60]] = 2.0
    tokens, _ = run([Row(), Row()], logits)
    assert tokens.tolist() == [0, 30]


def test_the_null_slot_is_greedy_and_an_inactive_row_is_zero():
    logits = random_logits(ROWS, V)
    tokens, read = run([Row(), Row(sampling=SamplingParams(logprobs=3), active=False)], logits[:2])
    assert tokens.tolist() == [int(logits[0].argmax()), 0]
    assert not read.ranks.any() and not read.top_ids.any()
    zeros = np.zeros(ROWS, np.int32)
    null = step(logits, pool_of([], []), zeros, zeros, np.ones(ROWS, bool))
    assert np.asarray(null.token_ids).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(logit_bias={5: 9.0})])
def test_a_row_with_nan_logits_has_no_token_and_others_keep_their_bits(sampling):
    rows, logits = [Row(sampling=sampling, seed=i) for i in range(5)], random_logits(5, V)
    tokens, read = run(rows, logits)
    damaged = logits.copy()
    damaged[[0, 2, 3], [5, 60, V - 1]] = np.nan, np.inf, -np.inf
    found, after = run(rows, damaged)
    assert found.tolist() == [NOT_FINITE, tokens[1], NOT_FINITE, NOT_FINITE, tokens[4]]
    for field in dataclasses.fields(read):
        assert np.array_equal(getattr(read, field.name)[[1, 4]], getattr(after, field.name)[[1, 4]])
    inactive = [dataclasses.replace(row, active=False) for row in rows]
    assert not run(inactive, damaged)[0].any()


@pytest.mark.parametrize(
    "wishes",
    [
        *rows_beside(__file__)["edits agree with the oracle and other rows keep their bits"],
        {"logit_bias": BIAS},
        {"logit_bias": BIAS, "min_tokens": 4, **PENALTIES},
    ],
    ids=lambda wishes: "+".join(wishes),
)
def test_edits_agree_with_the_oracle_and_other_rows_keep_their_bits(wishes):
    rng = np.random.default_rng(3)
    row = Row(
        sampling=SamplingParams(temperature=0.0, **wishes),
        prompt=tuple(rng.integers(0, 40, 150).tolist()),
        output=(3, 9, 9, 70),
        stop_ids=(11, 12),
    )
    early = dataclasses.replace(row, output=(70, 70, 3))
    rows = [row, Row(), early, Row(active=False, sampling=row.sampling)]
    logits = random_logits(4, V)
    expected = [oracle.edited_logits(logits[i], r.sampling, r.prompt, r.output, r.stop_ids) for i, r in enumerate(rows)]
    got = _edited(rows, logits)
    for i in (0, 2):
        np.testing.assert_allclose(got[i], expected[i], **TOLERANCE["float32"])
    np.testing.assert_array_equal(got[[1, 3]], logits[[1, 3]])
    tokens, _ = run(rows, logits)
    assert tokens.tolist() == [*(int(e.argmax()) for e in expected[:3]), 0]


@jax.jit
def _edits(logits, slots, row_slots, positions, active):
    words = read_parameters(slots, row_slots)
    flags = jnp.where(active, words[:, FLAGS], 0)
    x = edits.add_bias(logits, slots, row_slots, words, flags)
    x = edits.mask_stops(x, slots, row_slots, words, edits.forbids_stops(words, flags, positions))
    return edits.penalise(x, slots, row_slots, words, flags, positions)


def _edited(rows: list[Row], logits: np.ndarray) -> np.ndarray:
    slot_ids = list(range(1, len(rows) + 1))
    positions = np.array([row.position for row in rows], np.int32)
    active = np.array([row.active for row in rows])
    return np.asarray(_edits(logits, pool_of(rows, slot_ids), np.array(slot_ids, np.int32), positions, active))


def test_min_tokens_lets_the_stop_ids_through_once_enough_tokens_are_there():
    logits = np.zeros((3, V), np.float32)
    logits[:, 11] = 5.0
    row = Row(sampling=SamplingParams(temperature=0.0, min_tokens=2), stop_ids=(11,))
    rows = [dataclasses.replace(row, output=(8,) * n) for n in range(3)]
    tokens, _ = run(rows, logits)
    assert tokens.tolist() == [0, 0, 11]


FILTERS = [
    *rows_beside(__file__)["filters"],
    {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "temperature": 0.4, "logit_bias": BIAS, **PENALTIES},
]


@pytest.mark.parametrize(
    "wishes", FILTERS, ids=lambda wishes: "+".join(f"{k}={v}" for k, v in wishes.items() if k != "logit_bias")
)
def test_draws_follow_the_oracles_distribution(wishes):
    rows = [Row(sampling=SamplingParams(**wishes), output=(4, 4, 90), seed=seed) for seed in range(16 * ROWS)]
    logits = random_logits(1, V)
    expected = oracle.kept_probabilities(
        oracle.edited_logits(logits[0], rows[0].sampling, rows[0].prompt, rows[0].output, ()), rows[0].sampling
    )
    counts = _draw_counts(rows, logits)
    assert not counts[expected == 0].any()
    assert _chi_square_p(counts, expected) > 1e-4


def _draw_counts(rows: list[Row], logits: np.ndarray) -> np.ndarray:
    logits = np.repeat(logits, ROWS, axis=0)
    draws = [run(rows[i : i + ROWS], logits)[0] for i in range(0, len(rows), ROWS)]
    return np.bincount(np.concatenate(draws), minlength=V)


def _chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The upper tail of Pearson's statistic (Wilson-Hilferty); cells expected below 5 are pooled."""
    total = counts.sum()
    large = probabilities * total >= 5
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(probabilities[large], probabilities[~large].sum()) * total
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(observed) - 1
    if freedom == 0:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_a_rare_token_is_drawn_as_often_as_its_probability_says():
    noise = np.asarray(_gumbel(_seeds(NOISE_ROWS), np.zeros(NOISE_ROWS, np.int32), V)).ravel()
    assert np.isfinite(noise).all()
    for level in (7.0, 9.0, 10.0):
        expected = -np.expm1(-np.exp(-level)) * noise.size
        assert abs((noise > level).sum() - expected) < 5 * np.sqrt(expected)


def _seeds(count: int) -> np.ndarray:
    words = np.zeros((count, 16), np.int32)
    words[:, SEED_LOW] = np.arange(count)
    return words


def test_a_draw_depends_on_neither_companions_nor_row_nor_slot_nor_pool():
    row = Row(
        sampling=SamplingParams(top_k=50, top_p=0.97, repetition_penalty=1.1, seed=1), seed=-(2**63) + 5, output=(9,)
    )
    logits = random_logits(1, V, seed=9)[0]
    alone, _ = run([row], logits[None], bucket=1, max_seqs=1)
    for place, slot, companion in ((0, 1, Row()), (3, 8, Row(sampling=SamplingParams(min_p=0.2, logit_bias=BIAS)))):
        rows = [companion] * 6
        rows[place] = row
        others = random_logits(6, V, seed=place)
        others[place] = logits
        slot_ids = [s for s in range(1, 20) if s != slot][:6]
        slot_ids[place] = slot
        together, _ = run(rows, others, slot_ids=slot_ids)
        assert together[place] == alone[0]


def test_seed_choice_and_position_each_change_the_draw():
    wish = SamplingParams(temperature=3.0)
    variants = [
        Row(sampling=wish),
        Row(sampling=wish, seed=1),
        Row(sampling=wish, seed=1 << 32),
        Row(sampling=wish, seed=1 << 63),
        Row(sampling=wish, choice=1),
        Row(sampling=wish, output=(5,)),
    ]
    noise = [_noise(row) for row in variants]
    for i, a in enumerate(noise):
        for b in noise[i + 1 :]:
            assert not np.array_equal(a, b)
    np.testing.assert_array_equal(_noise(Row(sampling=wish, seed=-1)), _noise(Row(sampling=wish, seed=2**64 - 1)))


def _noise(row: Row) -> np.ndarray:
    words = np.repeat(row.record()[None, :16], NOISE_ROWS, axis=0)
    return np.asarray(_gumbel(words, np.full(NOISE_ROWS, row.position, np.int32), V))[:1]


def test_the_bits_are_those_of_jax_for_the_folded_key_and_the_noise_is_their_gumbel():
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), 2), 3)
    bits = np.asarray(jax.random.bits(key, (V,), jnp.uint32))
    row = Row(seed=7, choice=2)
    words = np.repeat(row.record()[None, :16], NOISE_ROWS, axis=0)
    got = np.asarray(_bits(words, np.full(NOISE_ROWS, row.position, np.int32), V))
    np.testing.assert_array_equal(got[17], bits)
    expected = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) / 2.0**32))
    np.testing.assert_allclose(_noise(row)[0], expected, **TOLERANCE["float32"])


@settings(max_examples=40)
@given(
    top_k=st.integers(0, V + 3),
    top_p=st.floats(1e-6, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(1e-3, 1e3),
    levels=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_the_kept_set_is_the_oracles_with_ties_kept_together(top_k, top_p, min_p, temperature, levels, seed):
    sampling = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    logits = np.random.default_rng(seed).integers(0, levels, V).astype(np.float32) / 4
    kept = _kept(Row(sampling=sampling), logits)
    expected = oracle.kept_probabilities(logits, sampling) > 0
    differing = kept != expected
    assert len(set(logits[differing])) <= 1, "thresholds more than one level apart"
    if differing.any():
        assert _on_the_edge(logits, sampling)


def _kept(row: Row, logits: np.ndarray) -> np.ndarray:
    scaled = (logits[None] - logits.max()) / np.float32(row.sampling.temperature)
    return np.asarray(_keeps(scaled, row.record()[None, :16]))[0]


@jax.jit
def _keeps(scaled, words):
    image = draw._ordered(scaled)
    return image >= draw._thresholds(scaled, image, words, words[:, FLAGS])[:, None]


_gumbel = jax.jit(gumbel, static_argnums=2)
_bits = jax.jit(row_bits, static_argnums=2)


def _on_the_edge(logits: np.ndarray, sampling: SamplingParams) -> bool:
    """top_p or min_p lies within float32's reach of a level's edge, where either side is right."""
    nearby = (1 - 1e-5, 1 + 1e-5)
    sets = set()
    for p in nearby:
        for m in nearby:
            wish = dataclasses.replace(sampling, top_p=min(1.0, sampling.top_p * p), min_p=min(1.0, sampling.min_p * m))
            sets.add((oracle.kept_probabilities(logits, wish) > 0).tobytes())
    return len(sets) > 1


def test_extreme_parameters_give_tokens_and_no_nan():
    logits = random_logits(6, V)
    extremes = [
        SamplingParams(temperature=1e-6),
        SamplingParams(temperature=1e300),
        SamplingParams(temperature=0.0, repetition_penalty=1e-300),
        SamplingParams(temperature=1.0, repetition_penalty=1e300),
        SamplingParams(top_p=5e-324, min_p=1.0, top_k=2**40),
        SamplingParams(temperature=1e-300),
    ]
    tokens, _ = run([Row(sampling=s) for s in extremes], logits)
    best = logits.argmax(axis=1)
    assert [int(tokens[i]) for i in (0, 4, 5)] == [int(best[i]) for i in (0, 4, 5)]
    assert all(0 <= token < V for token in tokens)


@pytest.mark.slow
def test_a_vocabulary_of_152k_compiles_and_agrees_with_the_oracle():
    vocabulary = 151_936
    logits = random_logits(2, vocabulary)
    wish = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logprobs=20, seed=3)
    rows = [
        Row(sampling=wish, prompt=tuple(range(100)), output=(7, 7)),
        Row(sampling=SamplingParams(temperature=0.0, logprobs=1)),
    ]
    tokens, read = run(rows, logits, bucket=2, max_seqs=2)
    edited = oracle.edited_logits(logits[0], wish, rows[0].prompt, rows[0].output, ())
    token, best = tokens.tolist()
    assert oracle.kept_probabilities(edited, wish)[token] > 0
    assert best == int(logits[1].argmax())
    for i, chosen in enumerate((token, best)):
        np.testing.assert_allclose(read.logprobs[i], oracle.log_softmax(logits[i])[chosen], **TOLERANCE["float32"])
        np.testing.assert_array_equal(read.top_ids[i], oracle.top_ids(logits[i], 20))


def test_one_executable_serves_every_mixture_of_parameters():
    logits = random_logits(3, V)
    mixtures = [
        [Row(), Row(), Row()],
        [Row(sampling=SamplingParams(top_k=3, logprobs=2)), Row(), Row(sampling=SamplingParams(logit_bias=BIAS))],
        [
            Row(active=False),
            Row(sampling=SamplingParams(temperature=0.0, **PENALTIES)),
            Row(sampling=SamplingParams(min_p=0.5)),
        ],
    ]
    run(mixtures[0], logits)
    compiled = compiled_step._cache_size()
    for rows in mixtures[1:]:
        run(rows, logits)
    assert compiled_step._cache_size() == compiled
