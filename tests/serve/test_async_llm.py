"""AsyncLLM: answers equal those of LLM, from many tasks and threads; who leaves leaves nothing behind.

AsyncLLM.transcribe: tasks get what LLM.transcribe gives.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from functools import partial
from unittest.mock import MagicMock

import pytest

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.async_llm import AsyncLLM, Refused
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine_thread import MOST_FAILURES, EngineFailed, Ticket
from ferrum_jax.engine.shared import SharedEngine
from ferrum_jax.inputs.images.decoding import Stopped
from ferrum_jax.tasks.task_maker import TaskMaker
from tests.serve.running import failing
from tests.support import GOLDENS, SMALL, in_loop, raising, small_llm
from tests.transcribing.heard import CASES, how_of, sound_of, text_of, whisper_llm

PROMPTS = [[7, 100, 33, 250, 61], [12, 9, 77], [200, 13, 14, 15, 16, 17, 18], [5] * 40]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=200)


@pytest.fixture
def llm():
    """One whose thread has ended after the test, with nothing left on the engine."""
    inner = small_llm("qwen3")
    inner.calls.drop()
    found = AsyncLLM.over(inner)
    yield found
    found.close()
    assert not found.thread.num_open
    inner.engine.scheduler.check_invariants()
    assert not inner.engine.has_unfinished and not inner.engine.scheduler.metrics().live


async def last(llm, prompt, params=GREEDY, **options):
    outputs = [output async for output in llm.generate(prompt, params, **options)]
    assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
    return outputs[-1]


async def together(llm, prompts=PROMPTS, params=GREEDY):
    return await asyncio.gather(*[last(llm, prompt, params) for prompt in prompts])


def test_many_tasks_are_answered_as_one_call_of_generate_is(llm):
    found = asyncio.run(together(llm, PROMPTS * 3))
    llm.close()
    wanted = llm.llm.generate(PROMPTS * 3, GREEDY)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert [output.text for output in found] == [output.text for output in wanted]


def test_several_threads_with_loops_of_their_own_share_one_engine(llm):
    found = {}

    def ask(index):
        found[index] = asyncio.run(together(llm))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(output.token_ids for output in outputs) for outputs in found.values()}) == 1


@in_loop
async def test_a_task_that_is_cancelled_or_leaves_its_loop_ends_its_rows(llm):
    with contextlib.suppress(StopAsyncIteration):
        async for _ in llm.generate(PROMPTS[0], LONG):
            break
    task = asyncio.create_task(last(llm, PROMPTS[1], LONG))
    while llm.thread.num_open != 1:
        await asyncio.sleep(0.001)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    stats = await llm.stats()
    assert [llm.thread.num_open, stats["num_running"], stats["num_waiting"]] == [0, 0, 0]
    assert len((await last(llm, PROMPTS[2])).token_ids) == 8


@in_loop
async def test_texts_wait_for_no_images_and_of_a_cancelled_task_no_more_are_decoded(llm, monkeypatch):
    begun, stopped, request = [], [], TaskMaker.request
    all_cancelled = threading.Event()  # a thread that is free before could begin one whose turn to be cancelled comes

    def held(maker, prompt, sampling, options, *, look):
        if not isinstance(prompt, dict):
            return request(maker, prompt, sampling, options, look=look)
        begun.append(prompt)
        try:
            while True:
                look()
                time.sleep(0.001)
        except Stopped:
            all_cancelled.wait(60)
            stopped.append(prompt)
            raise

    monkeypatch.setattr(TaskMaker, "request", held)
    images = [asyncio.create_task(last(llm, {"prompt": "x", "images": [b"a"]})) for _ in range(50)]
    while not begun:
        await asyncio.sleep(0.001)
    output = await last(llm, PROMPTS[0])
    for task in images:
        task.cancel()
    await asyncio.gather(*images, return_exceptions=True)
    all_cancelled.set()
    assert output.finished
    llm.close()
    llm._images.shutdown(wait=True)
    assert len(begun) == len(stopped) <= 2


@in_loop
async def test_abort_ends_the_loops_of_one_id_and_no_others(llm):
    other = asyncio.create_task(last(llm, PROMPTS[1], request_id="b"))
    outputs = []
    async for output in llm.generate(PROMPTS[0], LONG, request_id="a"):
        outputs.append(output)
        await llm.abort("a")
    assert len(outputs) == 1 and not outputs[0].finished
    assert (await other).finished


@in_loop
async def test_what_cannot_be_served_is_the_error_of_its_task_alone(llm):
    refused, output = await asyncio.gather(last(llm, [99_999]), last(llm, PROMPTS[0]), return_exceptions=True)
    assert isinstance(refused, ValueError) and "99999" in str(refused)
    assert output.finished


@in_loop
async def test_a_drained_engine_ends_what_runs_and_takes_nothing_new(llm):
    task = asyncio.create_task(last(llm, PROMPTS[0]))
    while not llm.thread.num_open:
        await asyncio.sleep(0.001)
    assert await llm.drain(30.0)
    with pytest.raises(Refused, match="drains"):
        await last(llm, PROMPTS[1])
    assert (await task).finished


@in_loop
async def test_a_call_of_many_tasks_ends_whole_where_the_engine_drains(llm):
    goes_on = threading.Event()

    def made(wait: bool):
        assert not wait or goes_on.wait(60)
        return llm.llm.model.tasks.completion(PROMPTS[0], GREEDY, RequestOptions())

    found, drained = [], None
    async for _, answer in llm.run((wait, partial(made, wait)) for wait in (False, True)):
        found.append(answer)
        drained = drained or asyncio.create_task(llm.drain(60.0))
        await asyncio.sleep(0)
        goes_on.set()
    assert await drained
    assert [output.finished for output in found] == [True, True]


@in_loop
async def test_a_step_that_fails_ends_what_ran_and_a_fresh_engine_goes_on(llm, monkeypatch):
    failing(monkeypatch, 1)
    with pytest.raises(EngineFailed, match="injected") as failed:
        await last(llm, PROMPTS[0])
    assert not failed.value.is_final
    assert (await last(llm, PROMPTS[0])).finished


@in_loop
async def test_a_sink_that_fails_ends_the_engine_and_leaves_nobody_waiting(llm):

    other = asyncio.create_task(last(llm, PROMPTS[0], LONG))
    while not llm.thread.num_open:
        await asyncio.sleep(0.001)
    llm.thread.add(Ticket(raising(RuntimeError("injected"))), PROMPTS[1], GREEDY, RequestOptions())
    with pytest.raises(EngineFailed, match="injected"):
        await other
    assert llm.thread.failed is not None and llm.thread.failed.is_final


@in_loop
async def test_an_engine_that_fails_again_and_again_is_given_up(llm, monkeypatch):
    failing(monkeypatch, 100)
    for index in range(MOST_FAILURES):
        with pytest.raises(EngineFailed) as failed:
            await last(llm, PROMPTS[0])
        assert failed.value.is_final == (index == MOST_FAILURES - 1)
    with pytest.raises(EngineFailed, match="injected"):
        await last(llm, PROMPTS[0])
    assert llm.thread.failed is not None
    monkeypatch.undo()


@in_loop
async def test_scores_new_weights_and_sleep_go_between_the_steps_of_what_runs():
    inner = LLM(str(GOLDENS / "qwen3"), SMALL)

    async def ask(llm):
        before = await last(llm, PROMPTS[0])
        scoring = llm.compute_logprobs(PROMPTS[:2], [before.token_ids, PROMPTS[1]])
        running, scores = await asyncio.gather(last(llm, PROMPTS[0], LONG), scoring)
        assert running.token_ids[:8] == before.token_ids and scores[0].token_ids == before.token_ids
        stream = llm.generate(PROMPTS[0], LONG)
        await anext(stream)
        assert await llm.update_weights(GOLDENS / "qwen3", requests="keep") == 1
        *_, kept = [output async for output in stream]
        assert kept.token_ids == running.token_ids and set(kept.outputs[0].weights_versions) == {0, 1}
        await llm.sleep()
        with pytest.raises(ValueError, match="wake_up"):
            await last(llm, PROMPTS[0])
        await llm.wake_up()
        assert (await last(llm, PROMPTS[0])).token_ids == before.token_ids

    async with AsyncLLM.over(inner) as llm:
        await ask(llm)


def test_threads_that_ask_for_a_dropped_engine_at_once_get_the_same_one():
    """Else the statistics of one server would replace the engine on which a request of another has just begun."""
    other = threading.Barrier(2)

    def make():
        with contextlib.suppress(threading.BrokenBarrierError):
            other.wait(0.3)  # for a second engine that is made meanwhile
        return object()

    calls = SharedEngine(MagicMock(), make, collector=MagicMock(), counter=MagicMock(), on_recompile="warn")
    calls.drop()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one, another = pool.map(lambda _: calls.engine, range(2))
    assert one is another


@in_loop
async def test_tasks_side_by_side_get_what_a_program_gets():
    inner = whisper_llm()
    inner.calls.drop()
    llm = AsyncLLM.over(inner)
    try:
        found = await asyncio.gather(*(llm.transcribe(sound_of(case), **how_of(case)) for case in CASES))
        with pytest.raises(ValueError, match="the sound is not a file of a kind"):
            await llm.transcribe(b"no sound")
        with pytest.raises(TypeError, match="tempo"):
            await llm.transcribe(b"no sound", tempo=2)
    finally:
        llm.close()
    assert [each.text for each in found] == [text_of(case) for case in CASES]
