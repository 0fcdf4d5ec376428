"""What holds of every source of drafts. NgramDrafts against a search through the text.

The drafts that a model's own head tells: good for one length of a request, and told with each step.
"""

import os
import random
import sys
import tracemalloc

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ferrum_jax.core.drafts.drafts import NO_DRAFT
from ferrum_jax.core.drafts.mtp_drafts import UNKNOWN, MtpDrafts
from ferrum_jax.core.drafts.ngram import NgramDrafts
from ferrum_jax.core.drafts.suffix import SuffixDrafts
from ferrum_jax.core.scheduler.drafting import Drafting, OpenRow, OpenShard, StepCosts
from tests.speculation.naive import naive_ngram, request_of
from tests.speculation.sources import SOURCES, history
from tests.support import written_by


def test_drafts_are_equal_in_every_process():
    program = "from tests.speculation.sources import *; print([history(SOURCES[name]()) for name in SOURCES])"
    written = written_by([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": "77"})
    assert written.strip() == str([history(SOURCES[name]()) for name in SOURCES])


@pytest.mark.parametrize("source", SOURCES)
def test_drafts_are_of_the_asked_length_with_confidences(source):
    said = history(SOURCES[source]())
    assert any(token_ids for token_ids, _ in said)
    for token_ids, confidences in said:
        assert len(token_ids) == len(confidences) <= 8
        assert set(token_ids) <= set(range(4)) and all(0 < c <= 1 for c in confidences)


@pytest.mark.parametrize("source", SOURCES)
def test_a_preempted_request_goes_on_as_if_it_had_not_been(source):
    """It keeps its Request; steps in which it does not run ask for no draft."""
    drafts, always = SOURCES[source](), SOURCES[source]()
    rng = random.Random(1)
    one, twin = request_of(1, [1, 2, 3]), request_of(1, [1, 2, 3])
    for step in range(100):
        token = rng.randrange(3)
        one.token_ids.append(token)
        twin.token_ids.append(token)
        expected = always.propose(twin, 8)
        if step % 30 < 20:
            assert drafts.propose(one, 8) == expected


@pytest.mark.parametrize("source", SOURCES)
def test_bytes_is_what_is_allocated(source):
    rng = random.Random(2)
    requests = [request_of(id, [rng.randrange(50_000) for _ in range(1500)]) for id in range(40)]
    tracemalloc.start()
    drafts = SOURCES[source]()
    for request in requests:
        drafts.propose(request, 4)
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * traced < drafts.bytes < 1.1 * traced


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


@pytest.mark.parametrize("made", [lambda: NgramDrafts(2, 4), lambda: SuffixDrafts(16, 100, 4.0, 0.0)])
@settings(max_examples=40, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=200), cuts=st.lists(st.integers(1, 200), max_size=6))
def test_drafts_do_not_depend_on_how_often_one_asks(made, tokens, cuts):
    drafts, request = made(), request_of(1, tokens[:1])
    for cut in sorted({*cuts, len(tokens)}):
        request.token_ids.extend(tokens[len(request.token_ids) : cut])
        draft = drafts.propose(request, 8)
        assert drafts.propose(request, 8) == draft
    assert draft == made().propose(request_of(2, tokens, num_prompt=1), 8)


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


def test_a_draft_is_good_for_the_length_that_it_was_told_at():
    drafts, request = MtpDrafts(), request_of(1, [5, 6, 7])
    assert drafts.propose(request, 1) == NO_DRAFT
    drafts.take(request, 8)
    assert drafts.propose(request, 3).token_ids == (8,) and drafts.propose(request, 0) == NO_DRAFT
    request.token_ids.append(9)
    assert drafts.propose(request, 1) == NO_DRAFT


def test_a_step_that_computed_nothing_tells_no_draft():
    drafts, request = MtpDrafts(), request_of(1, [5, 6, 7])
    drafts.take(request, UNKNOWN)
    assert drafts.propose(request, 1) == NO_DRAFT


def test_a_request_that_has_ended_is_forgotten():
    drafts, request = MtpDrafts(), request_of(1, [5, 6, 7])
    drafts.take(request, 8)
    assert drafts.bytes > 0
    drafts.forget(request)
    assert drafts.bytes == 0 and drafts.propose(request, 1) == NO_DRAFT


def test_a_draft_that_a_step_in_flight_brings_has_the_chance_of_one_token():
    drafting = Drafting(MtpDrafts(), most=1, num_places=8, num_tokens=16)
    request = request_of(1, [5, 6, 7], num_prompt=1)
    shard = OpenShard(rows=[OpenRow(request=request, most=1)], num_tokens=1, num_places=1, has_prompts=False)

    def pays(seconds: float) -> bool:
        drafting.costs = [StepCosts(num_rows=1, bare=1.0, sizes=((16, seconds),))]
        return drafting.pays([shard])

    assert pays(1.3) and not pays(1.4), "half of all drafts come true at first"
    assert drafting.choose([shard]) == [{}], "none is told yet"
    drafting.heads.take(request, 8)
    drafting.costs = [StepCosts(num_rows=1, bare=1.0, sizes=((16, 1.3),))]
    assert drafting.choose([shard]) == [{1: [8]}]
    request.token_ids.append(8)
    assert pays(1.4), "it came true"
    assert drafting.choose([shard]) == [{}]
