"""NgramDrafts against a search through the text."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ferrum_jax.speculation.drafts import NO_DRAFT
from ferrum_jax.speculation.ngram import NgramDrafts
from tests.speculation.naive import naive_ngram, request_of


@pytest.mark.parametrize("least, longest", [(1, 1), (1, 4), (2, 5), (3, 10)])
@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_drafts_are_those_of_a_search_through_the_text(least, longest, alphabet):
    rng = random.Random(alphabet)
    drafts = NgramDrafts(least, longest)
    requests = [request_of(id, [rng.randrange(alphabet) for _ in range(count)]) for id, count in enumerate((1, 7, 90))]
    num_drafted = 0
    for _ in range(100):
        for request in requests:
            request.token_ids.extend(rng.randrange(alphabet) for _ in range(rng.choice([0, 1, 1, 2])))
            draft = drafts.propose(request, 6)
            assert list(draft.token_ids) == naive_ngram(request.token_ids, least, longest, 6)
            num_drafted += len(draft.token_ids)
    assert num_drafted > 50


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=200), st.lists(st.integers(1, 200), max_size=6))
def test_drafts_do_not_depend_on_how_often_one_asks(tokens, cuts):
    drafts = NgramDrafts(2, 4)
    request = request_of(1, tokens[:1])
    for cut in sorted({*cuts, len(tokens)}):
        request.token_ids.extend(tokens[len(request.token_ids) : cut])
        draft = drafts.propose(request, 5)
        assert drafts.propose(request, 5) == draft
    assert draft == NgramDrafts(2, 4).propose(request_of(2, tokens), 5)


def test_the_most_recent_occurrence_is_followed():
    assert NgramDrafts(1, 2).propose(request_of(1, [1, 2, 3, 1, 2, 4, 1, 2]), 1).token_ids == [4]


def test_a_longer_match_decides_over_a_newer_one():
    assert NgramDrafts(1, 3).propose(request_of(1, [1, 2, 3, 9, 3, 7, 1, 2, 3]), 1).token_ids == [9]


def test_where_the_text_ends_the_draft_goes_round():
    assert NgramDrafts(1, 2).propose(request_of(1, [5, 1, 2, 3, 1, 2]), 7).token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_other_requests_are_not_read():
    drafts = NgramDrafts(1, 2)
    drafts.learn([1, 2, 3, 4], 2, b"")
    drafts.forget(request_of(1, [1, 2, 3, 4]))
    drafts.propose(request_of(2, [1, 2, 3, 4]), 4)
    assert drafts.propose(request_of(3, [1, 2]), 4) == NO_DRAFT


def test_a_forgotten_request_takes_no_memory():
    drafts = NgramDrafts(1, 2)
    request = request_of(1, range(1000))
    drafts.propose(request, 4)
    assert drafts.bytes > 1000 * 2 * 8
    drafts.forget(request)
    assert drafts.bytes == 0


@pytest.mark.parametrize("least, longest", [(0, 2), (3, 2)])
def test_settings_out_of_range_are_refused(least, longest):
    with pytest.raises(ValueError, match="prompt_lookup_min is"):
        NgramDrafts(least, longest)
