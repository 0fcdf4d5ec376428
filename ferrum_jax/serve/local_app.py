"""make_app: a server as a plain ASGI application, for uvicorn, for Ray Serve, for whatever else holds one.

    make_app(AsyncLLM("checkpoints/demo"), ServerSettings(names=("demo",)))

Engine and HTTP are two threads of one process here; `ferrum-jax serve` has them in two processes.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator

from starlette.applications import Starlette

from ferrum_jax.async_llm import AsyncLLM
from ferrum_jax.io.watched_threads import Told, start_thread
from ferrum_jax.serve.app.application import application
from ferrum_jax.serve.batches.batch_process import BatchDesk
from ferrum_jax.serve.engine_process import carry_messages
from ferrum_jax.serve.engine_side import EngineSide
from ferrum_jax.serve.http.served_prompts import ServedPrompts
from ferrum_jax.serve.http.service import Service
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link.engine_client import EngineClient, LocalLink
from ferrum_jax.serve.link.outbox import Outbox


def make_app(llm: AsyncLLM | Callable[[], AsyncLLM], settings: ServerSettings | None = None) -> Starlette:
    """The application over an `AsyncLLM`, which is the caller's to close; or over a function that opens one.

    A function is called as the application starts, in a thread, and its AsyncLLM is closed as it ends.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        opened = llm if isinstance(llm, AsyncLLM) else await asyncio.to_thread(llm)
        link = LocalLink(asyncio.get_running_loop())
        how = settings or ServerSettings()
        how.require_apart(opened.llm.model.adapters.names)
        side = EngineSide(opened.llm, opened.thread, link.outbox, how.roots)
        service = app.state.service = Service(EngineClient(link), how)
        link.take = side.take
        side.begin()
        await service.client.ready.wait()
        service.open(opened.llm.model.prompts, opened.llm.model.opened.texts.transcriber)
        batches = contextlib.nullcontext() if how.batches is None else _answering_batches(opened, how, side.fail)
        try:
            with batches:
                yield
        finally:
            service.drains = True
            await asyncio.to_thread(side.close)
            if opened is not llm:
                await asyncio.to_thread(opened.close)

    return application(settings or ServerSettings(), lifespan)


@contextlib.contextmanager
def _answering_batches(opened: AsyncLLM, settings: ServerSettings, on_failure: Told) -> Iterator[None]:
    """Batches are answered meanwhile, by threads of this process. on_failure: told of one that ends by an exception."""
    ours, theirs = socket.socketpair()
    outbox = Outbox()
    side = EngineSide(opened.llm, opened.thread, outbox, waits=True)
    carry_messages(ours, outbox, side)
    desk = BatchDesk(settings, theirs)
    served = ServedPrompts(opened.llm.model.prompts, opened.llm.model.opened.texts.transcriber)
    work = start_thread(lambda: desk.run(lambda _: served), on_failure, name="ferrum-batches")
    side.begin()
    try:
        yield
    finally:
        desk.end()
        work.join()
        side.close()
        for end in (ours, theirs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
