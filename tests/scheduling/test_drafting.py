"""Which drafted tokens a step computes: the likeliest, as many as pay, and none where none do."""

from array import array
from collections.abc import Sequence

import pytest

from ferrum_jax.core.drafts.drafts import Draft
from ferrum_jax.core.request import Request
from ferrum_jax.core.scheduler.drafting import Drafting, OpenRow, OpenShard, StepCosts
from tests.scheduling.fake_device import FakeDrafts, KnownDrafts, expected_tokens, next_token

FREE = [StepCosts(num_rows=1, bare=1.0, sizes=((4, 1.0), (8, 1.0), (16, 1.0)))]
DEAR = [StepCosts(num_rows=1, bare=1.0, sizes=((4, 4.0), (8, 8.0), (16, 16.0)))]


class Sure(FakeDrafts):
    """Drafts the same tokens for every row, sure of each by so much."""

    def __init__(self, confidences: Sequence[float]) -> None:
        self.confidences = confidences

    def propose(self, request: Request, most: int) -> Draft:
        found = list(self.confidences[:most])
        return Draft(token_ids=[9] * len(found), confidences=found)


def request_of(id: int, num_tokens: int = 4, **more) -> Request:
    ids = array("i", range(num_tokens))
    return Request(id=id, token_ids=ids, num_prompt_tokens=1, max_total_tokens=60, **more)


def drafting_of(source, costs=FREE, *, most: int = 8, num_places: int = 16) -> Drafting:
    made = Drafting(source, most=most, num_places=num_places, num_tokens=16, costs=costs)
    made._typical = 1.0
    return made


def shard_of(drafting: Drafting, requests: Sequence[Request], **more) -> OpenShard:
    rows = [OpenRow(request=request, most=drafting.most_of(request)) for request in requests]
    return OpenShard(**{"rows": rows, "num_tokens": len(rows), "num_places": len(rows), "has_prompts": False, **more})


def chosen(drafting: Drafting, *requests: Request, **more) -> dict[int, int]:
    """Drafted tokens by request id."""
    (found,) = drafting.choose([shard_of(drafting, requests, **more)])
    return {id: len(tokens) for id, tokens in found.items()}


def test_a_step_that_costs_nothing_more_is_filled_with_drafts():
    assert chosen(drafting_of(Sure([1.0] * 8)), request_of(1), request_of(2)) == {1: 8, 2: 6}, "earlier rows first"


def test_nothing_is_drafted_before_costs_are_told_and_where_none_pays():
    assert chosen(drafting_of(Sure([1.0] * 8), ()), request_of(1)) == {}
    assert chosen(drafting_of(Sure([0.9] * 8), DEAR), request_of(1)) == {}


def test_the_step_is_as_large_as_pays():
    costs = [StepCosts(num_rows=1, bare=1.0, sizes=((4, 1.5), (8, 2.0), (16, 9.0)))]
    assert chosen(drafting_of(Sure([1.0] * 8), costs), request_of(1)) == {1: 7}
    assert chosen(drafting_of(Sure([1.0, 1.0, 0.3, 0.3, 0.3, 0.3]), costs), request_of(1)) == {1: 3}


def test_the_likeliest_tokens_of_all_rows_come_first():
    drafting = drafting_of(Sure([0.9] * 8), num_places=8)
    first, second = request_of(1), request_of(2)
    drafting._learnt(first), drafting._learnt(second)
    drafting._rows[2].rate = 0.6
    assert chosen(drafting, first, second) == {1: 5, 2: 1}  # 0.9, 0.81, 0.73, 0.66, then 0.6 of the second, 0.59


def test_a_row_never_drafts_past_its_limit_and_not_where_it_wants_none():
    short = request_of(1)
    short.max_total_tokens = 7  # three more: two drafts and the token behind them
    assert chosen(drafting_of(Sure([1.0] * 8)), short, request_of(2, takes_drafts=False)) == {1: 2}


def test_a_draft_ends_before_a_token_that_ends_the_row():
    ends = request_of(1, stop_ids=frozenset([9]))
    assert chosen(drafting_of(Sure([1.0] * 8)), ends) == {}


def test_beside_prompts_drafts_take_what_is_padding_otherwise():
    drafting = drafting_of(Sure([1.0] * 8))
    assert chosen(drafting, request_of(1), num_tokens=6, num_places=2, has_prompts=True) == {1: 2}


def test_shards_draft_for_a_step_of_one_size():
    drafting = drafting_of(Sure([1.0] * 8))
    shards = [shard_of(drafting, [request_of(1)]), shard_of(drafting, [request_of(2), request_of(3)])]
    assert [{id: len(found) for id, found in of_shard.items()} for of_shard in drafting.choose(shards)] == [
        {1: 8},
        {2: 8, 3: 6},
    ]


@pytest.mark.parametrize(("kind", "least", "most"), [("right", 0.95, 1.0), ("wrong", 0.0, 0.05)])
def test_a_rate_is_learnt_whether_drafts_are_computed_or_not(kind, least, most):
    drafting = drafting_of(KnownDrafts(kind), DEAR)
    drafting._typical = 0.5
    ids = array("i", expected_tokens([1, 2, 3], 60, frozenset(), 0))
    request = Request(id=1, token_ids=ids[:4], num_prompt_tokens=3, max_total_tokens=200)
    while len(request.token_ids) < 60:
        drafting.choose([shard_of(drafting, [request])])
        request.token_ids.append(next_token(request.token_ids))
    assert least <= drafting._rows[1].rate <= most
    assert (drafting._typical > 0.5) == (kind == "right"), "new rows begin with what rows have shown"


def test_where_no_draft_pays_every_fourth_step_is_looked_at():
    drafting = drafting_of(Sure([0.5] * 8), DEAR)
    looked = 0
    for length in range(4, 44):
        if not drafting.rests:
            looked += 1
            assert not drafting.pays([shard_of(drafting, [request_of(1, length)])])
    assert 9 + 31 // 4 - 1 <= looked <= 9 + 31 // 4 + 1


def test_costs_are_those_of_the_next_larger_number_of_rows():
    few, many = StepCosts.of(2, 1.0, [[4, 1.0]]), StepCosts.of(8, 2.0, [[16, 3.0]])
    drafting = drafting_of(Sure([]), [few, many])
    assert [drafting._costs_of(rows) for rows in (1, 2, 3, 8, 9)] == [few, few, many, many, many]
    assert many.break_even == pytest.approx(1 - 1 / (1.1 * 1.5))
