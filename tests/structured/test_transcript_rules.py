"""What may come next in a transcript, against the rules as a plain reading of them; and what comes before its text."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.core.params_codec import params_of_json, params_to_json
from ferrum_jax.inputs.params.transcript import Transcript
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.text.structured.token_rules import TokenRules, allow

V, END, FIRST = 100, 60, 70  # words below 60, others below 70, times from there on
PLAIN = Transcript(end_id=END, suppressed=(3, 65), suppressed_first=(5, END))
TIMED = Transcript(end_id=END, suppressed=(3, 65), suppressed_first=(5,), stamps_from=FIRST, most_first_stamp=10)


def may_follow(asked: Transcript, output: list[int]) -> set[int]:
    mask = np.zeros(4, np.int32)
    allow(mask, list(range(V)))
    fault = TokenRules(SamplingParams(transcript=asked), frozenset({END}), None).narrow(mask, output)
    assert fault is None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follow_by_the_book(text: list[int]) -> set[int]:
    """The reference's rules for a text with times, one after the other."""
    left = set(range(V)) - {3, 65}
    if not text:
        return {token for token in left - {5} if FIRST <= token <= FIRST + 10}
    last = text[-1] >= FIRST
    before = len(text) < 2 or text[-2] >= FIRST
    if last:
        left = {token for token in left if (token < FIRST if before else token >= END)}
    if stamps := [token for token in text if token >= FIRST]:
        earliest = stamps[-1] + (0 if last and not before else 1)
        left = {token for token in left if not FIRST <= token < earliest}
    return left


@settings(max_examples=80)
@given(st.integers(0, 10**6))
def test_times_come_in_pairs_and_never_go_back(seed):
    rng, text = random.Random(seed), []
    for _ in range(12):
        allowed = may_follow(TIMED, text)
        assert allowed == follow_by_the_book(text)
        words, stamps = ([t for t in allowed if (t >= FIRST) == is_stamp] for is_stamp in (False, True))
        text.append(rng.choice(stamps if stamps and (rng.random() < 0.5 or not words) else words))
        if text[-1] == END:
            break


def test_a_text_without_times_begins_with_none_of_some_words():
    assert may_follow(PLAIN, []) == set(range(V)) - {3, 65, 5, END}
    assert may_follow(PLAIN, [7]) == set(range(V)) - {3, 65}


def test_language_and_what_follows_it_come_before_the_text():
    asked = Transcript(
        end_id=END, languages=(61, 62), then=(64, 66), suppressed=(61, 62, 64, 66), suppressed_first=(5,)
    )
    assert asked.num_leading == 3
    assert may_follow(asked, []) == {61, 62}
    assert (may_follow(asked, [62]), may_follow(asked, [62, 64])) == ({64}, {66})
    assert may_follow(asked, [62, 64, 66]) == set(range(V)) - {5, 61, 62, 64, 66}


def test_a_transcript_that_nothing_fits_says_so():
    mask = np.zeros(4, np.int32)
    allow(mask, [5])
    fault = TokenRules(SamplingParams(transcript=PLAIN), frozenset(), None).narrow(mask, [])
    assert fault is not None and "transcript" in fault


def test_a_transcript_goes_to_another_process_and_comes_back_equal():
    params = SamplingParams(transcript=TIMED, temperature=0.0)
    assert params_of_json(params_to_json(params)) == params and params.needs_mask


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"end_id": -1}, "token -1"),
        ({"end_id": 5, "then": (True,)}, "token True"),
        ({"end_id": 9, "stamps_from": 9}, "9"),
    ],
)
def test_a_transcript_of_ids_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Transcript(**fields)
