"""/v1/responses: a body in, a response or its events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.response_body import asked_response
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.http.event_stream import EventStream
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.response_form import ResponseForm
from ferrum_jax.serve.http.service import Service, TextRequest
from ferrum_jax.serve.link.engine_client import EngineLost, RequestRefused


async def responses(request: Request) -> Response:
    """The answer to a conversation, as a list of items; nothing is stored."""
    exchange = Exchange(request)
    service = exchange.service
    asked = await exchange.asked(asked_response)
    chat = asked.chat
    form = ResponseForm(asked, request_id=exchange.id, model=exchange.model(chat.model))
    (entered,) = await exchange.unless_left(service.enter(chat, exchange.key, exchange.id), chat.timeout_s)
    headers = warning_headers(chat.warnings)
    if not chat.streams:
        return exchange.json(await exchange.unless_left(_whole(service, form, entered), chat.timeout_s), headers)
    events = ResponseEvents(service, form, entered)
    try:
        first = await exchange.unless_left(events.first(), chat.timeout_s)
    except BaseException:
        await events.close()
        raise
    return EventStream(events, first, exchange, headers, timeout_s=chat.timeout_s)


async def _whole(service: Service, form: ResponseForm, entered: TextRequest) -> dict[str, Any]:
    try:
        async for new in service.outputs(entered):
            form.add(new)
    finally:
        service.leave([entered])
    form.end(entered.collected)
    return form.response


class ResponseEvents:
    """The events of one response. Closing it ends what runs for it."""

    def __init__(self, service: Service, form: ResponseForm, entered: TextRequest) -> None:
        self._service, self._form, self._entered = service, form, entered
        self._outputs = service.outputs(entered)
        self._events = self._all()

    async def first(self) -> bytes:
        """The first events. Raises what refuses the request, before a status is sent."""
        return await anext(self._events)

    def when_slow(self, cut: Callable[[], None]) -> None:
        """Has `cut` called when the reader of the events is too slow."""
        self._entered.on_slow = cut

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._events

    async def close(self) -> None:
        await self._events.aclose()
        self._service.leave([self._entered])

    async def _all(self) -> AsyncGenerator[bytes, None]:
        form, entered = self._form, self._entered
        new = await anext(self._outputs)
        yield form.begin() + form.add(new)
        try:
            async for new in self._outputs:
                if events := form.add(new):
                    yield events
        except (RequestRefused, EngineLost) as error:
            yield form.fail(str(error))
            return
        yield form.end(entered.collected)
