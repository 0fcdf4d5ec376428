"""The queue before the engine: bounded, fair between keys, and by priority within one.

Long work is done in threads of its own kind, in the turns of keys, and not for who has left.
"""

import asyncio
import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrum_jax.inputs.images.decoding import Stopped
from ferrum_jax.serve.http.fair_queue import QUANTUM, FairQueue, QueueEntry
from ferrum_jax.serve.http.fair_workers import FairWorkers
from tests.support import in_loop, raising


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


async def spin() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_keys_have_turns_and_few_run_at_once():
    began: list[str] = []
    free, lock = threading.Event(), threading.Lock()

    def work(name: str):
        def run(look):
            with lock:
                began.append(name)
            assert free.wait(30)
            return name

        return run

    async def run():
        workers = FairWorkers("test", 1)
        names = ["a1", "a2", "a3", "a4", "b1"]
        calls = [asyncio.create_task(workers.call(work(name), key=name[0], cost=2048)) for name in names]
        await spin()
        assert began in ([], ["a1"])
        free.set()
        return await asyncio.gather(*calls)

    assert asyncio.run(run()) == ["a1", "a2", "a3", "a4", "b1"]
    assert began[0] == "a1" and began.index("b1") < 3


@in_loop
async def test_what_nobody_waits_for_is_not_begun_and_ends_at_its_next_look():
    began, free = threading.Event(), threading.Event()
    ended: list[str] = []

    def running(look):
        began.set()
        assert free.wait(30)
        with contextlib.suppress(Stopped):
            look()
            ended.append("went on")
        ended.append("looked")

    workers = FairWorkers("test", 1)
    first = asyncio.create_task(workers.call(running, key="a", cost=1))
    second = asyncio.create_task(workers.call(lambda look: ended.append("begun"), key="a", cost=1))
    await asyncio.to_thread(began.wait, 30)
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    free.set()
    assert await workers.call(lambda look: "next", key="a", cost=1) == "next"
    assert ended == ["looked"]


@in_loop
async def test_nothing_is_begun_while_there_is_no_room():
    room = [False]
    workers = FairWorkers("test", 2, may_begin=lambda: room[0])
    call = asyncio.create_task(workers.call(lambda look: "done", key="a", cost=1))
    await asyncio.sleep(0.05)
    assert not call.done()
    room[0] = True
    workers.pump()
    assert await call == "done"


@in_loop
async def test_what_work_raises_is_raised_to_who_asked():

    workers = FairWorkers("test", 1)
    with pytest.raises(ValueError, match="wrong"):
        await workers.call(raising(ValueError("wrong")), key="a", cost=1)
    assert await workers.call(lambda look: "next", key="a", cost=1) == "next"
