"""Long work is done in threads of its own kind, in the turns of keys, and not for who has left."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from ferrum_jax.serve.http.fair_workers import FairWorkers
from ferrum_jax.vision.decoding import Stopped


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


def test_what_nobody_waits_for_is_not_begun_and_ends_at_its_next_look():
    began, free = threading.Event(), threading.Event()
    ended: list[str] = []

    def running(look):
        began.set()
        assert free.wait(30)
        with contextlib.suppress(Stopped):
            look()
            ended.append("went on")
        ended.append("looked")

    async def run():
        workers = FairWorkers("test", 1)
        first = asyncio.create_task(workers.call(running, key="a", cost=1))
        second = asyncio.create_task(workers.call(lambda look: ended.append("begun"), key="a", cost=1))
        await asyncio.to_thread(began.wait, 30)
        for task in (first, second):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        free.set()
        return await workers.call(lambda look: "next", key="a", cost=1)

    assert asyncio.run(run()) == "next"
    assert ended == ["looked"]


def test_nothing_is_begun_while_there_is_no_room():
    async def run():
        room = [False]
        workers = FairWorkers("test", 2, may_begin=lambda: room[0])
        call = asyncio.create_task(workers.call(lambda look: "done", key="a", cost=1))
        await asyncio.sleep(0.05)
        assert not call.done()
        room[0] = True
        workers.pump()
        return await call

    assert asyncio.run(run()) == "done"


def test_what_work_raises_is_raised_to_who_asked():
    def fails(look):
        raise ValueError("wrong")

    async def run():
        workers = FairWorkers("test", 1)
        with pytest.raises(ValueError, match="wrong"):
            await workers.call(fails, key="a", cost=1)
        return await workers.call(lambda look: "next", key="a", cost=1)

    assert asyncio.run(run()) == "next"
