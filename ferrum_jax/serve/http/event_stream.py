"""EventStream: a response of server-sent events that ends when its reader leaves, is too slow, or its time is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.http_errors import HttpError, http_error
from ferrum_jax.serve.http.service import Service, TextRequest, counted
from ferrum_jax.serve.link.engine_client import ReaderTooSlow

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class RequestEvents:
    """The events of requests that run; a subclass makes them in `_all`. Closing them ends what runs."""

    def __init__(self, service: Service, requests: Sequence[TextRequest]) -> None:
        self._service, self._requests = service, requests
        self._events = self._all()
        self._readers: list[asyncio.Task[None]] = []

    async def stream(self, exchange: Exchange, headers: Mapping[str, str], timeout_s: float | None) -> EventStream:
        """The response, once there is an event. Raises what refuses the request, before a status is sent."""
        try:
            first = await exchange.unless_left(anext(self._events), timeout_s)
        except BaseException:
            await self.close()
            raise
        return EventStream(self, first, exchange, headers, timeout_s=timeout_s)

    def when_slow(self, cut: Callable[[], None]) -> None:
        """Has `cut` called when the reader of the events is too slow."""
        for request in self._requests:
            request.on_slow = cut

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await self._events.aclose()
        self._service.leave(self._requests)

    def _all(self) -> AsyncGenerator[bytes, None]:
        raise NotImplementedError


class EventStream(Response):
    """An error after the first event becomes an event itself, for the status has been sent."""

    def __init__(
        self,
        events: RequestEvents,
        first: bytes,
        exchange: Exchange,
        headers: Mapping[str, str],
        *,
        timeout_s: float | None = None,
        counts: bool = True,
    ) -> None:
        """counts: whether a server that ends waits for it."""
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._events, self._first, self._exchange = events, first, exchange
        limit = exchange.service.settings.timeout_s if timeout_s is None else timeout_s
        self._timeout_s = None if limit == math.inf else limit
        self._counts = counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watch = asyncio.create_task(self._watch(receive, asyncio.current_task()))
        self._events.when_slow(lambda: self._cut(scope))
        try:
            with counted(self._exchange.service) if self._counts else contextlib.nullcontext():
                await self._send_all(send)
        except asyncio.CancelledError:
            if not watch.done():  # the server ends
                raise
            self._exchange.service.metrics.left()
            self._cut(scope)
        except Exception as error:
            await self._fail(error, scope, send)
        finally:
            watch.cancel()
            await self._events.close()

    async def _send_all(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send(send, self._first)
        async with asyncio.timeout(self._timeout_s):
            async for event in self._events:
                await self._send(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Any, content: bytes) -> None:
        await send({"type": "http.response.body", "body": content, "more_body": True})

    async def _watch(self, receive: Any, task: asyncio.Task[Any] | None) -> None:
        """Ends the response when its reader leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        assert task is not None, "a response is sent in a task"
        task.cancel()

    async def _fail(self, error: Exception, scope: Any, send: Any) -> None:
        """Says what went wrong; a reader that is too slow is told nothing and cut."""
        if isinstance(error, ReaderTooSlow):
            self._cut(scope)
            return
        known = http_error(error) or HttpError(500, "the server failed; its log says how", code="internal_error")
        with contextlib.suppress(Exception):
            await self._send(send, b"data: " + json.dumps(known.body).encode() + b"\n\n")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        if http_error(error) is None:
            raise error

    def _cut(self, scope: Any) -> None:
        """Closes the connection, whatever is still to be written."""
        abort = scope["state"].get("abort")
        if abort is not None:
            abort()
