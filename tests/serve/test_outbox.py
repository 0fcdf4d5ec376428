"""What waits between engine and HTTP is bounded, and tokens keep the times of their steps when they are read late."""

import asyncio
import threading

import pytest

from ferrum_jax.core.delta import Delta
from ferrum_jax.engine.engine_thread import EngineThread
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.http.api_keys import OPEN
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.link import outbox as outbox_module
from ferrum_jax.serve.link.engine_client import ReaderTooSlow
from ferrum_jax.serve.link.outbox import Outbox
from tests.serve.own_link import OwnLink, asked, open_over, service_over
from tests.support import in_loop, small_llm


def delta(request_id: int, tokens: list[int], *, choice: int = 0, last: bool = False, at: int = 0) -> Delta:
    times = [at + place for place in range(len(tokens))]
    return Delta(request_id, choice, tokens, None, "length" if last else None, None, last, 0, None, times)


def test_deltas_of_a_choice_join_and_the_last_of_a_request_stays_last():
    outbox = Outbox()
    outbox.add([delta(1, [5], at=10), delta(1, [6], choice=1, at=10), delta(2, [7], at=10)])
    outbox.add([delta(1, [8], choice=1, at=20), delta(1, [9], last=True, at=20)])
    ((_, found),) = outbox.take()
    assert [(each.id, each.choice, each.token_ids) for each in found] == [(2, 0, [7]), (1, 1, [6, 8]), (1, 0, [5, 9])]
    assert found[-1].is_last and found[-1].times_us == [10, 20]
    assert outbox.take() == []


def test_log_probabilities_and_those_of_the_prompt_survive_a_join():
    first = delta(1, [5])._replace(logprobs=[[(5, -1.0, 1)]], prompt_logprobs=[None])
    outbox = Outbox()
    outbox.add([first])
    outbox.add([delta(1, [6])._replace(logprobs=[[(6, -2.0, 1)]])])
    ((_, (found,)),) = outbox.take()
    assert found.logprobs == [[(5, -1.0, 1)], [(6, -2.0, 1)]] and found.prompt_logprobs == [None]


def test_of_beats_the_latest_waits_and_other_messages_keep_their_order():
    outbox = Outbox()
    for number in range(1000):
        outbox.put([["beat", number], ["stats", -number]])
    outbox.put([["refused", 1, "invalid", "no"], ["end", "drain"]])
    outbox.add([delta(2, [5])])
    assert [each[:2] for each in outbox.take()] == [
        ["deltas", [delta(2, [5])]],
        ["refused", 1],
        ["end", "drain"],
        ["beat", 999],
        ["stats", -999],
    ]


def test_what_changed_comes_before_the_answers_that_wait_and_after():
    outbox = Outbox()
    outbox.add([delta(1, [5])])
    outbox.put([["changed", 1], ["changed", 2], ["done", 3, None]])
    assert [each[:2] for each in outbox.take()] == [["changed", 2], ["deltas", [delta(1, [5])]], ["done", 3]]


def test_a_request_that_is_not_taken_is_cut_and_others_are_not(monkeypatch):
    monkeypatch.setattr(outbox_module, "MOST_UNSENT_TOKENS", 10)
    outbox, cut = Outbox(), []
    for step in range(20):
        going_on = [each for each in (1, 2) if each not in cut]
        cut += outbox.add([delta(1, [step])] * (1 in going_on) + [delta(2, [step])] * (step % 2))
    assert cut == [1]
    (_, found), refused = outbox.take()
    assert {each.id for each in found} == {2} and refused[:3] == ["refused", 1, "slow"]


def test_who_waits_for_something_is_woken_once():
    woken: list[int] = []
    outbox = Outbox(lambda: woken.append(1))
    outbox.add([delta(1, [5])])
    outbox.put([["beat", 1]])
    assert len(woken) == 1
    outbox.take()
    thread = threading.Timer(0.05, lambda: outbox.put([["end", "stop"]]))
    thread.start()
    assert outbox.take(None) == [["end", "stop"]]
    thread.join()


def test_an_engine_to_which_nobody_listens_ends_what_runs_and_goes_on(monkeypatch):
    monkeypatch.setattr(outbox_module, "MOST_UNSENT_TOKENS", 20)
    llm = small_llm("qwen3")
    llm.calls.drop()
    thread, outbox = EngineThread(llm.calls), Outbox()
    side = EngineSide(llm, thread, outbox)
    params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    try:
        side.take(["add", 1, [7, 9], {"max_tokens": 240, **params}, {}])
        side.take(["add", 2, [7, 9, 11], {"max_tokens": 4, **params}, {}])
        while not any(message[0] == "refused" for message in outbox._messages):
            thread.call(int).result()
        thread.call(int).result()
        assert thread.num_open == 0
        (_, (found,)), refused = outbox.take()
        assert (found.id, len(found.token_ids), found.is_last) == (2, 4, True) and refused[:3] == ["refused", 1, "slow"]
        side.take(["add", 3, [7, 9], {"max_tokens": 2, **params}, {}])
        assert outbox.take(None)[0][1][0].id == 3
    finally:
        thread.close()


async def served(link: OwnLink) -> tuple[Service, list]:
    """A service over the link, and one request of it that the engine has."""
    service = service_over(link)
    open_over(service, link, forms=["kimi_k2", None])
    assert service._collector.texts.forms.names == ("kimi_k2", None)  # of the engine, whatever the chat template shows
    return service, await service.enter(asked([7, 9], max_tokens=500), OPEN, "request")


@in_loop
async def test_tokens_that_are_read_late_have_the_times_of_their_steps():
    link = OwnLink()
    service, (request,) = await served(link)
    arrived = int(request.arrived * 1e6)
    steps = [arrived + 50_000 + 10_000 * step for step in range(101)]
    link.receive([["deltas", [[1, 0, list(range(5, 106)), None, "length", None, True, 0, None, steps]]]])
    async for _ in service.outputs(request):
        pass
    found = service.metrics.recent()
    assert found["first"] == pytest.approx([0.05, 0.05], abs=1e-5)
    assert found["between"] == pytest.approx([0.01, 0.01], abs=1e-5)


@in_loop
async def test_a_request_that_was_cut_on_the_engines_side_ends_and_makes_room():
    link = OwnLink()
    service, (request,) = await served(link)
    cut: list[bool] = []
    request.on_slow = lambda: cut.append(True)
    reading = asyncio.create_task(service.whole(request))
    await asyncio.sleep(0)
    link.receive([["refused", 1, "slow", "9000 tokens were not sent"]])
    with pytest.raises(ReaderTooSlow, match="9000"):
        await reading
    assert (cut, service.client.num_open, service.gate._rows_begun) == ([True], 0, 0)
