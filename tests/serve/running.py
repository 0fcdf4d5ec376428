"""A running server over a small model in this process, and sockets that speak to it as no client would."""

import asyncio
import contextlib
import functools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrum_jax.async_llm import AsyncLLM
from ferrum_jax.config import EngineConfig
from ferrum_jax.engine.engine import Engine
from ferrum_jax.runtime.runner import Runner
from ferrum_jax.serve.app.uvicorn_server import uvicorn_server
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.local_app import make_app
from tests.support import COMPILED, GOLDENS, ROOT, SMALL

# Shows tools, thoughts and calls: the marks say which forms the model writes.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }} {% endif %}{% if add_generation_prompt %}a:{% endif %}"
)
DEMO = str(ROOT / "checkpoints" / "demo")
DEMO_SIZES = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 64}


def url_of(process: subprocess.Popen) -> str:
    """Where `ferrum-jax serve` says that it listens; AssertionError with what it said instead."""
    said = []
    for line in process.stderr or ():
        said.append(line)
        if " at http" in line:
            return line.split(" at ")[1].split("/v1 ")[0]
    raise AssertionError("".join(said))


def demo_server(folder: Path, *more: str) -> subprocess.Popen:
    """`ferrum-jax serve` with the demo model, whose chat template shows tools. more: words of the command."""
    shutil.copy(f"{DEMO}/tokenizer.json", folder)
    config = json.loads(Path(DEMO, "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = [word for name, value in DEMO_SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--tokenizer", str(folder), "--served-model-name", "demo", "--port", "0", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "ferrum_jax", "serve", "--model", DEMO, *words, "--compilation-cache-dir", COMPILED],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def serving_demo(folder: Path) -> Iterator[str]:
    """The URL of a `demo_server`. folder: an empty one."""
    process = demo_server(folder)
    try:
        yield url_of(process) + "/v1"
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stderr.close()


@functools.cache
def serving_llm(sizes: EngineConfig = SMALL):
    """A small model whose chat template has tools and thoughts, made once in a process."""
    from ferrum_jax.llm import LLM

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(GOLDENS / "qwen3" / "tokenizer.json", folder)
        config = json.loads((GOLDENS / "qwen3" / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
        with open(f"{folder}/tokenizer_config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        return LLM(str(GOLDENS / "qwen3"), sizes, tokenizer=folder)


class Running:
    """A server and what it stands on."""

    def __init__(self, llm: AsyncLLM, app: Any, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.llm, self.app, self.port, self._loop = llm, app, port, loop
        self.url = f"http://127.0.0.1:{port}"

    @property
    def service(self):
        return self.app.state.service

    def num_tasks(self) -> int:
        """Tasks of the server's loop, and that which counts them."""

        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), self._loop).result(30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def raw(self, content: bytes) -> bytes:
        """What the server answers to these bytes before it closes."""
        with self.connect() as connection:
            connection.sendall(content)
            found = b""
            with contextlib.suppress(OSError):
                while part := connection.recv(1 << 16):
                    found += part
            return found

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of an answer. body: an object, or bytes as they are; None is a GET."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        answer = self.raw(request(path, content, "GET" if body is None else "POST", **headers))
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        is_json = found.get("content-type", "").startswith("application/json")
        return int(first.split()[1]), found, json.loads(rest) if is_json else rest

    def wait_until_idle(self, seconds: float = 30.0) -> None:
        """Nothing runs, waits or is read any more; the books are right."""
        until = time.monotonic() + seconds
        service = self.service
        while self.llm.thread.num_open or service.num_open or service.client.num_open or service.num_waiting:
            assert time.monotonic() < until, "something of a request is left"
            time.sleep(0.01)
        self.llm.thread.call(self._check).result()

    def _check(self) -> None:
        engine = self.llm.llm.calls.engine
        assert not engine.has_unfinished and not engine.counts()["live"]
        if isinstance(engine, Engine):
            engine.scheduler.check_invariants()


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The next `times` steps fail on the device."""
    dispatch, left = Runner.dispatch, [times]

    def fail(self, plan):
        if left[0]:
            left[0] -= 1
            raise RuntimeError("injected")
        return dispatch(self, plan)

    monkeypatch.setattr(Runner, "dispatch", fail)


def request(path: str, content: bytes, method: str = "POST", **headers: str) -> bytes:
    named = {
        "Host": "x",
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + content


_open: list[Running] = []


@contextlib.contextmanager
def running(settings: ServerSettings | None = None, *, send_buffer: int = 0, inner: Any = None) -> Iterator[Running]:
    """A server on a free port, over an engine with empty caches. inner: the LLM, None for a small one.

    send_buffer: bytes of it that Linux keeps.
    """
    inner = inner or serving_llm()
    for other in _open:  # of a fixture, over the same LLM: what still runs there would fail with its engine
        other.wait_until_idle()
    inner.calls.drop()
    llm = AsyncLLM.over(inner)
    app = make_app(llm, settings or ServerSettings(names=("small",)))
    server = uvicorn_server(app)
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server could not start"
            time.sleep(0.01)
        found = Running(llm, app, listener.getsockname()[1], loops[0])
        _open.append(found)
        yield found
        found.wait_until_idle()
    finally:
        _open[:] = [each for each in _open if each.llm is not llm]
        server.should_exit = True
        thread.join()
        llm.close()
        listener.close()
