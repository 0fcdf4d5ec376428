"""The queue before the engine: bounded, fair between keys, and by priority within one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.serve.http.fair_queue import QUANTUM, FairQueue, QueueEntry


def queue(**bounds: int) -> FairQueue:
    return FairQueue(**{"max_requests": 1000, "max_tokens": 10**9, **bounds})


def drained(waiting: FairQueue) -> list[QueueEntry]:
    return list(iter(waiting.pop, None))


def test_one_key_is_served_by_priority_and_then_by_arrival():
    waiting = queue()
    entries = [QueueEntry(key="a", cost=10, priority=priority) for priority in (1, 0, 1, -1)]
    assert waiting.push(entries)
    assert drained(waiting) == [entries[3], entries[1], entries[0], entries[2]]


def test_keys_get_equal_tokens_however_many_requests_they_have():
    waiting = queue()
    waiting.push([QueueEntry(key="large", cost=QUANTUM) for _ in range(40)])
    waiting.push([QueueEntry(key="small", cost=QUANTUM // 8) for _ in range(40)])
    first = [waiting.pop() for _ in range(18)]
    tokens = {key: sum(entry.cost for entry in first if entry.key == key) for key in ("large", "small")}
    assert abs(tokens["large"] - tokens["small"]) <= 2 * QUANTUM


def test_a_newcomer_waits_for_a_turn_and_not_for_a_queue():
    waiting = queue()
    waiting.push([QueueEntry(key="flood", cost=100) for _ in range(500)])
    new = QueueEntry(key="new", cost=100)
    waiting.push([new])
    assert drained(waiting).index(new) <= QUANTUM // 100 + 1


def test_requests_that_cost_more_than_a_turn_come_up_too():
    waiting = queue()
    huge = QueueEntry(key="huge", cost=50 * QUANTUM)
    waiting.push([huge])
    waiting.push([QueueEntry(key="other", cost=QUANTUM) for _ in range(200)])
    assert drained(waiting).index(huge) <= 60


def test_a_full_queue_takes_all_of_a_request_or_nothing():
    waiting = queue(max_requests=3, max_tokens=100)
    assert waiting.push([QueueEntry(key="a", cost=30) for _ in range(2)])
    assert not waiting.push([QueueEntry(key="b", cost=1) for _ in range(2)])
    assert not waiting.push([QueueEntry(key="b", cost=41)])
    assert waiting.push([QueueEntry(key="b", cost=40)])
    assert (waiting.num_requests, waiting.num_tokens) == (3, 100)


def test_one_request_that_is_larger_than_the_bound_runs_when_nothing_else_waits():
    waiting = queue(max_tokens=100)
    assert waiting.push([QueueEntry(key="a", cost=500)])
    assert not waiting.push([QueueEntry(key="a", cost=1)])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9000), st.sampled_from(["push", "pop", "remove"]))))
def test_every_request_leaves_once_and_the_counts_are_those_of_what_waits(events):
    waiting, inside = queue(), []
    for key, cost, what in events:
        if what == "push":
            inside.append(QueueEntry(key=key, cost=cost))
            assert waiting.push([inside[-1]])
        elif what == "pop":
            found = waiting.pop()
            assert (found is None) == (not inside)
            inside = [entry for entry in inside if entry is not found]
        elif inside:
            waiting.remove(inside.pop(0))
        assert waiting.num_requests == len(inside) and waiting.num_tokens == sum(entry.cost for entry in inside)
    assert {id(entry) for entry in drained(waiting)} == {id(entry) for entry in inside}
    assert waiting.pop() is None
