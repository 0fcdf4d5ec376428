"""SuffixDrafts against a search through all texts, over random histories of requests."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ferrum_jax.core.drafts import gram_book, own_grams, shared_grams
from ferrum_jax.core.drafts.drafts import NO_DRAFT
from ferrum_jax.core.drafts.suffix import SuffixDrafts
from tests.marks import few
from tests.rows import rows_beside
from tests.speculation.naive import NaiveSuffix, request_of

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=80)


def _drafts(*, depth=16, texts=100, factor=4.0, prob=0.0, tokens=1 << 16) -> SuffixDrafts:
    return SuffixDrafts(depth, texts, factor, prob, max_cached_tokens=tokens)


@pytest.fixture
def whole_walks(monkeypatch):
    """No lookup gives up on a full bucket, so that answers are those of the definition."""
    for module in (own_grams, shared_grams):
        monkeypatch.setattr(module, "WALK", 1 << 20)


CASES = rows_beside(__file__)["cases"]


@pytest.mark.parametrize("seed", few(range(3)))
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_a_search_through_all_texts(case, seed, whole_walks):
    given = CASES[case]
    rng = random.Random(f"{case} {seed}")
    drafts = _drafts(**given)
    naive = NaiveSuffix(
        given["depth"],
        given["texts"],
        given["factor"],
        given["prob"],
        max_tokens=given["tokens"],
        places=given["tokens"] - 2,
    )
    running, num_drafted = [], 0

    def text(count: int) -> list[int]:
        if rng.random() < 0.3:
            return [rng.randrange(3)] * count
        return [rng.randrange(3) for _ in range(count)]

    for id in range(150):
        if len(running) < 4:
            prompt = text(rng.choice([1, 2, 9, 40, 90]))
            salt = rng.choice([b"", b"tenant"])
            running.append(request_of(id, prompt, salt=salt))
        for request in running:
            if rng.random() < 0.8:
                request.token_ids.extend(text(rng.choice([0, 1, 1, 1, 3, 90 if id % 20 == 0 else 1])))
                most = rng.choice([1, 8, 30])
                draft = drafts.propose(request, most)
                expected, shares = naive.propose(request, most)
                assert list(draft.token_ids) == expected
                assert list(draft.confidences) == shares
                num_drafted += len(expected)
        if rng.random() < 0.15:
            request = running.pop(rng.randrange(len(running)))
            request.token_ids.extend(text(2))
            drafts.forget(request)
            naive.forget(request)
        if rng.random() < 0.1:
            learnt = text(30), rng.randrange(31), rng.choice([b"", b"tenant"])
            drafts.learn(*learnt)
            naive.learn(*learnt)
    assert num_drafted > 100


def test_what_a_running_request_generated_serves_another():
    drafts = _drafts()
    other = request_of(1, [7, 8])
    drafts.propose(other, 4)
    other.token_ids.extend([1, 2, 3, 4, 5])
    drafts.propose(other, 4)
    assert drafts.propose(request_of(2, [9, 2, 3]), 4).token_ids == [4, 5]


def test_a_prompt_is_its_own_until_its_request_has_finished():
    drafts = _drafts()
    other = request_of(1, [1, 2, 3, 4, 5])
    drafts.propose(other, 4)
    reader = request_of(2, [9, 2, 3])
    assert drafts.propose(reader, 4) == NO_DRAFT
    drafts.forget(other)
    assert drafts.propose(reader, 4).token_ids == [4, 5]


def test_texts_of_another_salt_are_not_read():
    drafts = _drafts()
    drafts.learn([1, 2, 3, 4, 5], 2, b"a tenant")
    assert drafts.propose(request_of(1, [2, 3], salt=b"another"), 4) == NO_DRAFT
    assert drafts.propose(request_of(2, [2, 3], salt=b"a tenant"), 4).token_ids == [4, 5]


def test_the_longest_match_decides_over_a_newer_one():
    drafts = _drafts()
    drafts.learn([1, 2, 3, 40], 0, b"")
    drafts.learn([9, 3, 50], 0, b"")
    draft = drafts.propose(request_of(1, [1, 2, 3]), 1)
    assert draft.token_ids == [40] and draft.confidences == [1.0]


def test_confidences_are_shares_of_the_places_and_ties_go_to_the_newest():
    drafts = _drafts()
    for token in (5, 6, 6, 7):
        drafts.learn([1, 2, token, token], 0, b"")
    draft = drafts.propose(request_of(1, [1, 2]), 2)
    assert draft.token_ids == [6, 6] and draft.confidences == [0.5, 1.0]
    drafts.learn([1, 2, 5, 8], 0, b"")
    assert drafts.propose(request_of(2, [1, 2]), 1).token_ids == [5]


def test_a_draft_ends_where_it_would_be_too_unlikely():
    drafts = _drafts(prob=0.6)
    for token in (5, 6, 6):
        drafts.learn([1, 2, 3, token, 4, 4], 0, b"")
    drafts.learn([1, 2, 3, 6, 9, 9], 0, b"")
    draft = drafts.propose(request_of(1, [1, 2, 3]), 3)
    assert draft.token_ids == [6] and draft.confidences == [0.75]


def test_a_draft_is_no_longer_than_the_factor_times_its_match():
    drafts = _drafts(factor=1.5)
    drafts.learn([1, 2, *range(10, 30)], 0, b"")
    assert drafts.propose(request_of(1, [1, 2]), 20).token_ids == [10, 11, 12]
    assert drafts.propose(request_of(2, [1, 2]), 2).token_ids == [10, 11]
    assert drafts.propose(request_of(3, [1, 2]), 0) == NO_DRAFT


def test_a_repetition_goes_on_beyond_what_is_known():
    assert _drafts().propose(request_of(1, [1, 2, 3] * 5), 7).token_ids == [1, 2, 3, 1, 2, 3, 1]


@settings(max_examples=30, deadline=None)
@given(TOKENS, st.integers(0, 80), TOKENS)
def test_learning_a_text_is_as_if_a_request_had_finished_with_it(text, num_prompt, asked):
    learnt, ran = _drafts(), _drafts()
    num_prompt = min(num_prompt, len(text))
    learnt.learn(text, num_prompt, b"")
    ran.forget(request_of(1, text, num_prompt=num_prompt))
    assert learnt.propose(request_of(2, asked), 8) == ran.propose(request_of(2, asked), 8)


def test_a_finished_text_is_kept_as_it_was():
    drafts = _drafts()
    request = request_of(1, [1, 2, 3, 4])
    drafts.forget(request)
    request.token_ids.extend([5, 6])
    assert drafts.propose(request_of(2, [2, 3]), 4).token_ids == [4]


def test_memory_has_a_bound():
    drafts = _drafts(texts=50, tokens=2048)
    rng = random.Random(0)
    held = []
    for id in range(300):
        request = request_of(id, [rng.randrange(1000) for _ in range(100)], num_prompt=50)
        drafts.propose(request, 4)
        drafts.forget(request)
        drafts.learn([rng.randrange(1000) for _ in range(100)], 10, b"")
        held.append(drafts.bytes)
    assert max(held) == held[-1] <= 40 * 2048 + 4 * 2048 + 640 * 50


def test_a_text_longer_than_the_room_drives_no_other_out():
    drafts = _drafts(tokens=64)
    drafts.learn([1, 2, 3, 4], 0, b"")
    drafts.learn([9] * 65, 65, b"")
    assert drafts.propose(request_of(1, [2, 3]), 4).token_ids == [4]
    assert drafts.propose(request_of(2, [9]), 4) == NO_DRAFT


def test_a_lookup_gives_up_on_a_crowded_bucket(request):
    """Places of texts that are gone stand before the one that would be found."""

    def drafted() -> bool:
        drafts = _drafts(texts=0)
        other = request_of(1, [8, 1, 2, 3], num_prompt=1)
        drafts.propose(other, 4)
        for _ in range(gram_book.WALK):
            drafts.learn([8, 1, 2, 7], 1, b"")
        return drafts.propose(request_of(2, [1, 2]), 4) != NO_DRAFT

    assert not drafted()
    request.getfixturevalue("whole_walks")
    assert drafted()


@pytest.mark.parametrize(
    "wrong", [{"depth": 0}, {"texts": -1}, {"factor": -1.0}, {"prob": 1.5}, {"prob": -0.1}], ids=str
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="max_tree_depth is"):
        _drafts(**wrong)
