"""The HTTP process of `ferrum-jax serve`: uvicorn, texts and JSON. No jax is here, and no signal ends it.

It is started before the model loads, so that /livez, /health and /ready answer at once, and ends when it is told
to, when all that runs has ended after "drain", or when the engine's process is gone.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

from ferrum_jax.serve.app.application import application
from ferrum_jax.serve.app.uvicorn_server import uvicorn_server
from ferrum_jax.serve.http.served_prompts import read_prompts
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link.engine_client import EngineClient, PipeLink

_CLOSED_S = 0.2  # between two looks at what still runs


@dataclasses.dataclass(frozen=True, kw_only=True)
class HttpOrder:
    """What the process is started with. link, listener: file descriptors that it inherits."""

    settings: ServerSettings
    link: int
    listener: int
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None


class HttpProcess:
    """One server over a link."""

    def __init__(self, order: HttpOrder) -> None:
        self._order = order
        self._link = PipeLink(self._lose)
        self.service = Service(EngineClient(self._link), order.settings)
        self.service.client.on_order = self._obey
        self._server = uvicorn_server(
            application(order.settings, self._lifespan),
            root_path=order.root_path,
            ssl_keyfile=order.ssl_keyfile,
            ssl_certfile=order.ssl_certfile,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Serves until the end."""
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._link.open(socket.socket(fileno=self._order.link))
        listener = socket.socket(fileno=self._order.listener)
        await self._server.serve(sockets=[listener])

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        app.state.service = self.service
        self._begin(self._open())
        yield

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        """Reads tokenizer and chat template once the engine says where they are."""
        service = self.service
        await service.client.ready.wait()
        try:
            service.open(*await asyncio.to_thread(read_prompts, service.client.facts))
        except BaseException:  # a panic of the tokenizer's library is no Exception
            logging.exception("the model's texts cannot be read")
            os._exit(1)  # which the engine's process sees

    def _obey(self, order: str) -> None:
        self.service.drains = True
        if order == "stop":
            self._server.should_exit = True
        else:
            self._begin(self._drain())

    async def _drain(self) -> None:
        while self.service.num_open:
            await asyncio.sleep(_CLOSED_S)
        self._server.should_exit = True

    def _lose(self) -> None:
        """The engine's process is gone: nothing can be answered any more."""
        self.service.client.lose("the engine's process has ended")
        self._server.should_exit = True


def _allow_connections() -> None:
    """As many open sockets as the system lets this process have; its default is 1,024 on most machines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(order: HttpOrder) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _allow_connections()
    logging.raiseExceptions = False  # a disk that is full for logs ends no answer
    HttpProcess(order).run()
    os._exit(0)
