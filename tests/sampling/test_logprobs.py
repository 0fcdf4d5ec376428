"""Log-probabilities: of the model's own distribution, for chosen tokens and for prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ferrum_jax.asked.sampling import MAX_LOGPROBS, SamplingParams
from ferrum_jax.sampling import row_results, unpack
from pallas_kernels.tolerance import TOLERANCE
from tests.oracles import sampling as oracle
from tests.sampling.rows import Row, V, random_logits, run


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
