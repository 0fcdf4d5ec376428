"""A server under load and among the hostile: bounded, fair, and with nothing left of those who leave."""

import asyncio
import contextlib
import http.client
import json
import random
import socket
import threading
import time

import pytest

from ferrum_jax.runtime.runner import Runner
from ferrum_jax.serve.app import uvicorn_server
from ferrum_jax.serve.http.api_keys import read_keys
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link import engine_client
from tests.histories import seeded
from tests.serve.own_link import got
from tests.serve.running import failing, request, running

LONG = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "x", "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("small",), max_body_bytes=100_000, body_s=0.5)) as found:
        yield found


@pytest.fixture
def slow_steps(monkeypatch):
    """Steps of 20 ms or more."""
    dispatch = Runner.dispatch

    def slow(self, plan):
        time.sleep(0.02)
        return dispatch(self, plan)

    monkeypatch.setattr(Runner, "dispatch", slow)


def until(holds, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def body(asked) -> bytes:
    return json.dumps(asked).encode()


@pytest.mark.parametrize("streams", [False, True])
def test_who_leaves_ends_what_runs_for_them(server, slow_steps, streams):
    with server.connect() as connection:
        connection.sendall(request("/v1/completions", body({**LONG, "stream": streams, "n": 3})))
        until(lambda: server.llm.thread.num_open == 1)
        if streams:
            assert connection.recv(100)
    server.wait_until_idle(2.0)


def test_texts_to_embed_whose_reader_leaves_are_forgotten(server, slow_steps):
    with server.connect() as connection:
        connection.sendall(request("/v1/embeddings", body({"input": ["x " * 60] * 20})))
        until(lambda: server.llm.thread.num_open > 1)
    server.wait_until_idle(5.0)
    side = server.service.client._link.take.__self__
    assert not side._readings and not side._ids and not side._tickets


def test_who_leaves_the_queue_is_forgotten(slow_steps):
    with running(ServerSettings(names=("small",))) as server:
        connections = [server.connect() for _ in range(20)]
        for connection in connections:
            connection.sendall(request("/v1/completions", body(LONG)))
        until(lambda: server.service.gate.num_waiting == 15)  # 4 rows, and one that is ready to be the next
        for connection in connections:
            connection.close()
        server.wait_until_idle(2.0)


def test_a_full_queue_says_when_to_come_again(slow_steps):
    with running(ServerSettings(names=("small",), max_waiting=2)) as server:
        connections = [server.connect() for _ in range(7)]
        for connection in connections:
            connection.sendall(request("/v1/completions", body(LONG)))
        until(lambda: server.service.gate.num_waiting == 2)
        status, headers, found = server.ask("/v1/completions", SHORT)
        assert status == 429 and found["error"]["code"] == "queue_full"
        assert 1 <= int(headers["retry-after"]) <= 60
        for connection in connections:
            connection.close()
        server.wait_until_idle(2.0)
        assert server.ask("/v1/completions", SHORT)[0] == 200


def test_a_request_ends_at_its_deadline(server, slow_steps):
    status, _, found = server.ask("/v1/completions", {**LONG, "timeout": 0.2})
    assert (status, found["error"]["code"]) == (408, "timeout")
    answer = server.raw(request("/v1/completions", body({**LONG, "timeout": 0.2, "stream": True})))
    assert b'"code": "timeout"' in answer and b"[DONE]" not in answer
    server.wait_until_idle(2.0)


def test_a_reader_that_stops_reading_is_cut_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(engine_client, "MOST_UNREAD_TOKENS", 20)
    with running(ServerSettings(names=("small",)), send_buffer=4096) as server, server.connect() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asked = {**LONG, "logprobs": 20, "n": 4, "stream": True}
        stuck.sendall(request("/v1/completions", body(asked)))
        until(lambda: 'ferrum:slow_readers_total{model_name="small"} 1.0' in server.ask("/metrics")[2].decode())
        assert server.ask("/v1/completions", SHORT)[0] == 200
        server.wait_until_idle(5.0)


BROKEN = [
    (b"{", 400),
    (b"[1]", 400),
    (b"\xff\xfe", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": 1e999}', 400),
    (b'{"a": 1, "a": 2}', 400),
    (b"[" * 50_000, 400),
    (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", 400),
    (b'{"prompt": "' + b"x" * 100_000 + b'"}', 413),
    (b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
    (b'{"prompt": {"prompt": "x"}}', 400),
    (b'{"prompt": "x", "n": 1e400}', 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}", 400),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', 400),
    (b'{"prompt": "x", "stop": [[]]}', 400),
    (b'{"messages": "x"}', 400),
]


@pytest.mark.parametrize(("content", "status"), BROKEN, ids=[str(i) for i in range(len(BROKEN))])
def test_a_broken_body_is_refused(server, content, status):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
        found, _, answer = server.ask(path, content)
        assert found == status and answer["error"]["message"]


def test_bodies_that_are_too_slow_or_never_end_are_given_up(server):
    begun = request("/v1/completions", body(SHORT))
    with server.connect() as connection:
        connection.sendall(begun[:-5])
        assert connection.recv(100).startswith(b"HTTP/1.1 408")
    chunked = request("/v1/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with server.connect() as connection:
        connection.sendall(chunked + b"1000\r\n" + b" " * 4096 + b"\r\n" + b"18000\r\n" + b" " * 0x18000)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/nothing", {}, 404),
        ("/v1/models", {}, 405),
        ("/v1/completions", {"Content-Type": "text/plain"}, 415),
        ("/v1/completions", {}, 413),
    ],
)
def test_who_sends_a_large_body_reads_why_it_is_refused(path, headers, status):
    """An answer on a connection that is closed or reset while its client still writes would be lost."""
    with running(ServerSettings(names=("small",), max_body_bytes=100_000)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        with contextlib.closing(connection):
            for _ in range(2):  # and the connection goes on
                connection.request("POST", path, b"x" * 5_000_000, {"Content-Type": "application/json", **headers})
                answer = connection.getresponse()
                assert answer.status == status and json.loads(answer.read())["error"]["message"]


def test_headers_that_never_end_are_given_up(monkeypatch):
    monkeypatch.setattr(uvicorn_server, "HEADERS_S", 0.2)
    with running() as server:
        for content in (b"", b"POST / HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            with server.connect() as connection:
                connection.sendall(content)
                assert connection.recv(100) == b""
        with server.connect() as connection, pytest.raises(OSError):
            for _ in range(100):
                connection.sendall(b"X: " + b"a" * 4096 + b"\r\n" if _ else b"GET /health HTTP/1.1\r\n")
                time.sleep(0.001)
        assert server.ask("/health")[0] == 200


KEYS = "sk-aaaaaaaa alice\nsk-bbbbbbbb bob\nsk-cccccccc carol team\nsk-dddddddd dave team  # shared\n"


def keyed(tmp_path) -> ServerSettings:
    for name, text in (("keys", KEYS), ("admin", "sk-admin-key\n")):
        (tmp_path / name).write_text(text)
    return ServerSettings(names=("small",), keys=read_keys(tmp_path / "keys"), admin_keys=read_keys(tmp_path / "admin"))


@pytest.mark.slow
def test_a_connection_is_kept_longer_than_clients_keep_it(server):
    """Five seconds: a client that asks on one that the server has just closed would get an error."""
    with server.connect() as connection:
        for wait_s in (5.5, 0.0):
            connection.sendall(request("/v1/completions", body(SHORT), Connection="keep-alive"))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, len(json.loads(answer.read())["choices"])) == (200, 1)
            time.sleep(wait_s)


def test_keys_see_no_cached_prefix_of_others_unless_they_share_one(tmp_path):
    asked = {"prompt": [7] * 100, "max_tokens": 1}

    def cached(server, key: str) -> int:
        status, _, found = server.ask("/v1/completions", asked, Authorization=f"Bearer {key}")
        assert status == 200
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(keyed(tmp_path)) as server:
        assert [cached(server, f"sk-{name * 8}") for name in "abcabd"] == [0, 0, 0, 100, 100, 100]


def test_who_has_no_key_learns_only_whether_the_server_is_there(tmp_path):
    with running(keyed(tmp_path)) as server:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic sk-aaaaaaaa"}):
            status, _, found = server.ask("/v1/completions", SHORT, **headers)
            assert (status, found["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask("/v1/models", **headers)[0] == server.ask("/metrics", **headers)[0] == 401
        assert server.ask("/health")[0] == server.ask("/ready")[0] == 200
        assert server.ask("/metrics", Authorization="Bearer sk-aaaaaaaa")[0] == 401
        assert server.ask("/metrics", Authorization="Bearer sk-admin-key")[0] == 200


def test_of_two_keys_none_is_taken(tmp_path):
    with running(keyed(tmp_path)) as server:
        asked = request("/v1/models", b"", "GET", Authorization="Bearer sk-aaaaaaaa")
        assert server.raw(asked).startswith(b"HTTP/1.1 200")
        twice = asked.replace(b"Authorization", b"Authorization: Bearer sk-bbbbbbbb\r\nAuthorization", 1)
        answer = server.raw(twice)
        assert answer.startswith(b"HTTP/1.1 400") and b"the header Authorization is given twice; send one" in answer


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "sk-aaaaaaaa a b c\n", "sk-aaaaaaaa\nsk-aaaaaaaa\n"])
def test_a_file_without_good_keys_is_refused_and_tells_none_of_them(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match="keys") as refused:
        read_keys(tmp_path / "keys")
    assert "sk-" not in str(refused.value) and "short" not in str(refused.value)


def test_health_fails_while_a_step_hangs_and_is_well_again_after(monkeypatch):
    release, dispatch = threading.Event(), Runner.dispatch

    def hang(self, plan):
        assert release.wait(30)
        return dispatch(self, plan)

    monkeypatch.setattr(Runner, "dispatch", hang)
    with running(ServerSettings(names=("small",), watchdog_s=0.5)) as server, server.connect() as connection:
        assert server.ask("/health")[0] == 200
        connection.sendall(request("/v1/completions", body(SHORT)))
        until(lambda: server.ask("/health")[0] == 503)
        assert server.ask("/ready")[0] == 503
        release.set()
        until(lambda: server.ask("/health")[0] == 200)
        assert b"200 OK" in connection.recv(100)


def test_a_step_that_fails_is_a_500_and_the_next_request_is_answered(monkeypatch, server):
    failing(monkeypatch, 1)
    status, _, found = server.ask("/v1/completions", SHORT)
    assert status == 500 and "injected" in found["error"]["message"]
    assert server.ask("/v1/completions", SHORT)[0] == 200


def test_a_host_that_gives_a_request_no_state_is_served(server):
    assert asyncio.run(got(server.app, "/v1/models"))[0] == 200


def test_garbage_and_leavers_among_good_requests_change_no_answer(server):
    """Some hundred in a few seconds, of ten clients at once; the slow suite has a thousand."""
    wanted = {n: server.ask("/v1/completions", {**SHORT, "prompt": [n, 9]})[2]["choices"] for n in range(7, 17)}
    wrong: list[object] = []

    def good(n: int) -> None:
        found = server.ask("/v1/completions", {**SHORT, "prompt": [n, 9]})[2]
        if found.get("choices") != wanted[n]:
            wrong.append(found)

    def leave(n: int) -> None:
        with server.connect() as connection:
            connection.sendall(request("/v1/completions", body({**LONG, "prompt": [n, 9], "stream": bool(n % 2)})))
            time.sleep(random.random() / 50)

    def spoil(n: int) -> None:
        with server.connect() as connection:
            connection.sendall(
                (b"\x00\xff garbage\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\n", BROKEN[n % 9][0])[n % 3]
            )

    def one(seed: int) -> None:
        draw = random.Random(seeded(seed))
        for _ in range(12):
            draw.choices((good, leave, spoil), (5, 3, 2))[0](draw.randrange(7, 17))

    clients = [threading.Thread(target=one, args=(seed,)) for seed in range(10)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert not wrong
    server.wait_until_idle(10.0)
