"""Log-probabilities: of the model's own distribution, for chosen tokens and for prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ferrum_jax.request import MAX_LOGPROBS, SamplingParams
from ferrum_jax.sampling import prompt_logprobs, unpack, wants_prompt_logprobs
from ferrum_jax.sampling.logprobs import row_results
from tests.oracles import sampling as oracle
from tests.oracles.tolerance import TOLERANCE
from tests.sampling.rows import MAX_LEN, Row, V, null_slots, pool_of, random_logits, run


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
    packed = jax.jit(row_results)(random_logits(1, 7), np.array([3], np.int32), wanted=asked, tops_wanted=asked)
    assert len(unpack(np.asarray(packed)).row(0, 20)) == 7


@pytest.mark.parametrize("num_tokens", [8, 150])
def test_prompt_logprobs_are_of_the_next_prompt_token_and_only_of_rows_that_asked(num_tokens):
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((V, 12)).astype(np.float32)
    hidden = rng.standard_normal((num_tokens, 12)).astype(np.float32)
    asks = Row(sampling=SamplingParams(prompt_logprobs=4), prompt=tuple(rng.integers(0, V, num_tokens).tolist()))
    slots = pool_of([asks, Row(prompt=asks.prompt)], [1, 2])
    # slot 1 computes its last `mine` prompt tokens, slot 2 the others
    mine = num_tokens - num_tokens // 4
    token_slots = np.where(np.arange(num_tokens) < mine, 1, 2).astype(np.int32)
    positions = np.where(token_slots == 1, np.arange(num_tokens) + num_tokens - mine, 0).astype(np.int32)
    wanted = jax.jit(wants_prompt_logprobs)(slots, jnp.asarray(token_slots), jnp.asarray(positions))
    assert np.asarray(wanted).tolist() == [True] * (mine - 1) + [False] * (num_tokens - mine + 1)
    packed = _run_prompt(hidden, weight, slots, token_slots, positions, wanted)
    read = unpack(packed)
    logits = hidden.astype(np.float64) @ weight.T.astype(np.float64)
    for t in range(mine - 1):
        following = asks.prompt[positions[t] + 1]
        assert read.token_ids[t] == following
        assert read.ranks[t] == oracle.rank(logits[t], following)
        np.testing.assert_allclose(read.logprobs[t], oracle.log_softmax(logits[t])[following], **TOLERANCE["float32"])
        np.testing.assert_array_equal(read.top_ids[t, :4], oracle.top_ids(logits[t], 4))
    assert not packed[mine - 1 :].any()


def _run_prompt(hidden, weight, slots, token_slots, positions, wanted) -> np.ndarray:
    @jax.jit
    def compute(hidden, weight, slots, token_slots, positions, wanted):
        def by_row(hidden, compute, *rows):
            return compute(hidden @ weight.T, *rows)

        return prompt_logprobs(hidden, by_row, slots, token_slots, positions, wanted)

    return np.asarray(compute(hidden, weight, slots, jnp.asarray(token_slots), jnp.asarray(positions), wanted))


def test_prompt_logprobs_do_no_work_when_nobody_asks():
    calls = []

    def by_row(hidden, compute, *rows):
        jax.debug.callback(lambda: calls.append(1))
        return compute(hidden, *rows)

    slots, zeros = null_slots(1, MAX_LEN), jnp.zeros(9, jnp.int32)
    run_it = jax.jit(lambda h, w: prompt_logprobs(h, by_row, slots, zeros, zeros, w))
    run_it(jnp.ones((9, V)), jnp.zeros(9, bool)).block_until_ready()
    jax.effects_barrier()
    assert calls == []
    run_it(jnp.ones((9, V)), jnp.ones(9, bool)).block_until_ready()
    jax.effects_barrier()
    assert calls == [1]
