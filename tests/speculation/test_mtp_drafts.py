"""The drafts that a model's own head tells: good for one length of a request, and told with each step."""

from __future__ import annotations

from ferrum_jax.scheduling.drafting import Drafting, OpenRow, OpenShard, StepCosts
from ferrum_jax.speculation.drafts import NO_DRAFT
from ferrum_jax.speculation.mtp_drafts import UNKNOWN, MtpDrafts
from tests.speculation.naive import request_of


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
