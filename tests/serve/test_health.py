"""/health says whether requests are taken, /livez whether the process lives; a thread that ends is a server's end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ferrum_jax.asked.options import RequestOptions
from ferrum_jax.asked.sampling import SamplingParams
from ferrum_jax.serve import engine_process
from ferrum_jax.serve.app.application import application
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.engine_thread import EngineFailed, EngineThread, Ticket
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.link.outbox import Outbox
from tests.serve.own_link import OwnLink, got, open_over, service_over
from tests.serve.test_under_load import until
from tests.support import small_llm


class Panic(BaseException):
    """What a library in Rust raises where it should not: no Exception."""


def panics(*arguments: object, **named: object) -> None:
    raise Panic("called `Option::unwrap()` on a `None` value")


def ready(service: Service, link: OwnLink) -> None:
    open_over(service, link)


def draining(service: Service, link: OwnLink) -> None:
    ready(service, link)
    service.drains = True


def failed(service: Service, link: OwnLink) -> None:
    ready(service, link)
    link.receive([["beat", {"silence_s": 0.0, "num_open": 0, "dead": "a thread failed", "num_steps": 0}]])


def hanging(service: Service, link: OwnLink) -> None:
    ready(service, link)
    link.receive([["beat", {"silence_s": 31.0, "num_open": 1, "dead": None, "num_steps": 0}]])


@pytest.mark.parametrize(
    ("state", "status", "said"),
    [
        (lambda service, link: None, 503, "loading"),
        (ready, 200, "ready"),
        (draining, 503, "the server ends"),
        (failed, 503, "a thread failed"),
        (hanging, 503, "no step has ended for 31 s"),
    ],
)
def test_health_is_200_only_while_requests_are_taken(state, status, said):
    async def ask():
        link = OwnLink()
        service = service_over(link)
        state(service, link)
        app = application(service.settings, None)
        app.state.service = service
        return [await got(app, path) for path in ("/health", "/ready", "/livez")]

    health, also, alive = asyncio.run(ask())
    assert health[0] == also[0] == status and said in health[1]
    assert alive[0] == 200


@pytest.fixture
def thread():
    llm = small_llm("qwen3")
    llm.calls.drop()
    found = EngineThread(llm)
    yield found
    found.close()


def test_a_panic_on_the_engines_thread_is_told_to_who_waits_and_to_the_server(thread, monkeypatch):
    heard: list = []
    monkeypatch.setattr(thread._llm.calls, "step", panics)
    thread.add(Ticket(heard.extend), [7, 9], SamplingParams(max_tokens=3), RequestOptions())
    until(lambda: heard)
    ((_, error),) = heard
    assert isinstance(error, EngineFailed) and error.is_final and "Panic" in str(error)
    assert thread.failed is error, "others who ask hear it too"
    thread.add(Ticket(heard.extend), [7, 9], SamplingParams(max_tokens=3), RequestOptions())
    thread.call(int).result(30)
    assert heard[1][1] is error


@pytest.mark.parametrize("where", ["_to_embed", "_tell_beat"])
def test_a_panic_in_any_thread_of_the_engines_side_makes_the_server_unhealthy(thread, monkeypatch, where):
    outbox = Outbox()
    side = EngineSide(thread._llm, thread, outbox)
    monkeypatch.setattr(side, where, panics)
    monkeypatch.setattr(side, "_tell_beat", lambda: told.append(side.failed) if side.failed else panics())
    told: list = []
    if where == "_to_embed":
        side.take(["embed", 1, "a text", {}])
    else:
        side.begin()
    until(lambda: told)
    assert "Panic" in told[0] and side.failed == told[0]
    side.close()


@pytest.mark.parametrize("broken", ["thread", "side"])
def test_the_engines_process_ends_with_70_once_a_thread_has_ended(broken):
    child = engine_process.HttpChild.__new__(engine_process.HttpChild)
    child._next_signal = lambda: None
    child._process = SimpleNamespace(poll=lambda: None, wait=lambda seconds: None)
    child._child, child._say = SimpleNamespace(tell=lambda order: None), lambda text: None
    child._batches = None
    parts = {name: SimpleNamespace(failed="it ended" if name == broken else None) for name in ("thread", "side")}
    parts["side"].opened = asyncio.Event()
    assert child._wait(parts["thread"], parts["side"], lambda: None, 1.0) == 70
