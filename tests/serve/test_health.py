"""/health says whether requests are taken, /livez whether the process lives; a thread that ends is a server's end."""

import ast
import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine_thread import EngineFailed, EngineThread, Ticket
from ferrum_jax.io import watched_threads as watched
from ferrum_jax.openai.asked import EMBEDS
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.serve import engine_process
from ferrum_jax.serve.app.application import application
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.link.outbox import Outbox
from ferrum_jax.serve.link.wire import received, send
from tests.serve.own_link import OwnLink, got, open_over, service_over
from tests.serve.test_under_load import until
from tests.support import ROOT, in_loop, small_llm


class Panic(BaseException):
    """What a library in Rust raises where it should not: no Exception."""


def panics(*arguments: object, **named: object) -> None:
    raise Panic("called `Option::unwrap()` on a `None` value")


def thrown(error: BaseException) -> None:
    raise error


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
@in_loop
async def test_health_is_200_only_while_requests_are_taken(state, status, said):
    link = OwnLink()
    service = service_over(link)
    state(service, link)
    app = application(service.settings, None)
    app.state.service = service
    health, also, alive = [await got(app, path) for path in ("/health", "/ready", "/livez")]
    assert health[0] == also[0] == status and said in health[1]
    assert alive[0] == 200


@pytest.fixture
def thread():
    llm = small_llm("qwen3")
    llm.calls.drop()
    found = EngineThread(llm.calls)
    yield found
    found.close()


def test_a_panic_on_the_engines_thread_is_told_to_who_waits_and_to_the_server(thread, monkeypatch):
    heard: list = []
    monkeypatch.setattr(thread._calls, "step", panics)
    thread.add(Ticket(heard.extend), [7, 9], SamplingParams(max_tokens=3), RequestOptions())
    until(lambda: heard)
    ((_, error),) = heard
    assert isinstance(error, EngineFailed) and error.is_final and "Panic" in str(error)
    assert thread.failed is error, "others who ask hear it too"
    thread.add(Ticket(heard.extend), [7, 9], SamplingParams(max_tokens=3), RequestOptions())
    thread.call(int).result(30)
    assert heard[1][1] is error


def test_a_call_that_hangs_is_silence_though_nothing_runs(thread):
    begun, ends = threading.Event(), threading.Event()
    thread.call(lambda: begun.set() or ends.wait(30))
    assert begun.wait(30) and thread.silence_s == 0.0
    thread.call(int)  # as the next look at the statistics is
    assert thread.silence_s > 0.0
    ends.set()
    until(lambda: thread.silence_s == 0.0)


@pytest.mark.parametrize("where", ["_reader", "_tell_beat"])
def test_a_panic_in_any_thread_of_the_engines_side_makes_the_server_unhealthy(thread, monkeypatch, where):
    outbox = Outbox()
    side = EngineSide(small_llm("qwen3"), thread, outbox)
    monkeypatch.setattr(side, where, panics)
    monkeypatch.setattr(side, "_tell_beat", lambda: told.append(side.failed) if side.failed else panics())
    told: list = []
    if where == "_reader":
        side.take(["read", 1, EMBEDS, {"prompt": "a text"}])
    else:
        side.begin()
    until(lambda: told)
    assert "Panic" in told[0] and side.failed == told[0]
    side.close()


def replies(link: socket.socket, count: int) -> dict[int, list]:
    """Messages about so many requests, by their ids."""
    found: dict[int, list] = {}
    for message in received(link):
        if message[0] in ("refused", "done"):
            found[message[1]] = message
        if len(found) == count:
            break
    return found


@pytest.fixture
def carried(thread, tmp_path):
    """A side of the engine whose messages are carried, and the other end of its link."""
    (tmp_path / "loop").symlink_to("loop")
    ours, theirs = socket.socketpair()
    side = EngineSide(small_llm("qwen3"), thread, Outbox(), (str(tmp_path), str(tmp_path)))
    engine_process.carry_messages(ours, side._outbox, side)
    yield side, theirs
    theirs.close()
    side.close()


@pytest.mark.parametrize("path", ["a" * 300, "loop", "loop/a", "a\0b", "\ud83d"])
def test_a_path_that_the_system_refuses_is_refused_and_the_next_request_is_answered(carried, path):
    side, link = carried
    send(link, [["control", 1, "update_weights", {"path": path, "requests": None}]])
    send(link, [["load_adapter", 2, "a", path, False], ["control", 3, "state", {}]])
    found = replies(link, 3)
    assert [found[number][0] for number in (1, 2, 3)] == ["refused", "refused", "done"] and side.failed is None
    assert [found[number][2] for number in (1, 2)] == ["invalid", "invalid"]


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("x"), RuntimeError("no")])
def test_a_request_that_fails_in_the_engines_process_is_refused_alone(carried, monkeypatch, error):
    side, link = carried

    monkeypatch.setattr("ferrum_jax.serve.engine_side.control", lambda *arguments: thrown(error))
    send(link, [["control", 1, "state", {}], ["add", 2, [7], {"other": 1}, {}], ["abort", 9], ["control", 3, "x", {}]])
    assert [message[0] for message in replies(link, 3).values()] == ["refused"] * 3 and side.failed is None


def test_what_ends_the_thread_that_reads_makes_the_server_unhealthy(carried, monkeypatch):
    side, link = carried
    monkeypatch.setattr(side, "_do", panics)
    send(link, [["opened"]])
    until(lambda: side.failed)
    assert "Panic" in side.failed and any(message[0] == "beat" and message[1]["dead"] for message in received(link))


def test_any_thread_that_ends_by_an_exception_is_heard_of(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    told: list[str] = []
    watched.watch_all_threads(told.append)
    for error in (OSError("gone"), Panic("at last")):
        thread = threading.Thread(target=thrown, args=(error,))
        thread.start()
        thread.join()
    assert len(told) == 2 and "OSError: gone" in told[0] and "Panic: at last" in told[1]


AWAITED = {"async_llm.py", "fair_workers.py"}  # every result of their pools is awaited


def test_no_thread_of_a_server_is_started_unwatched():
    folder = ROOT / "ferrum_jax"
    alone = [folder / name for name in ("async_llm.py", "engine/engine_thread.py", "io/watched_threads.py")]
    starts = ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "ThreadPool")
    found = set()
    for path in (*alone, *(folder / "serve").rglob("*.py")):
        called = (each.func for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call))
        names = {getattr(each, "attr", getattr(each, "id", "")) for each in called}
        found |= {path.name} if names & {*starts} else set()
    assert found == AWAITED | {"watched_threads.py"}


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
