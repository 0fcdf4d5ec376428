"""What is counted of drafts: by position, in sums over shards, and under the keys of LLM.stats."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrum_jax.core.metrics import SpeculationCounts

STEPS = st.lists(st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=12)


def counted(steps: list[tuple[int, int]]) -> SpeculationCounts:
    found = SpeculationCounts()
    for drafted, accepted in steps:
        found.count(drafted, accepted)
    return found


def test_drafts_are_counted_by_position_and_a_step_without_one_is_none():
    assert counted([(3, 2), (0, 0), (2, 0), (4, 1)]).snapshot() == {
        "speculation_steps": 3,
        "drafted_tokens": 9,
        "accepted_tokens": 3,
        "drafted_by_position": [3, 3, 2, 1],
        "accepted_by_position": [2, 1, 0, 0],
    }
    assert counted([]).snapshot()["drafted_by_position"] == []
    with pytest.raises(AssertionError, match="3 of 2 drafted tokens"):
        SpeculationCounts().count(2, 3)


@settings(max_examples=50)
@given(STEPS)
def test_positions_add_up_to_tokens(steps):
    found = counted(steps).snapshot()
    assert found == json.loads(json.dumps(found))
    for name in ("drafted", "accepted"):
        assert sum(found[f"{name}_by_position"]) == found[f"{name}_tokens"]


def test_a_snapshot_stays_as_it_was_taken():
    counts = counted([(2, 1)])
    before = counts.snapshot()
    counts.count(2, 2)
    assert before["drafted_by_position"] == [1, 1] and before["accepted_by_position"] == [1, 0]
