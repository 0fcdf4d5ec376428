"""/v1/responses: a body in, a response or its events out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.response_body import asked_response
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.http.event_stream import RequestEvents
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
    return await ResponseEvents(service, form, entered).stream(exchange, headers, chat.timeout_s)


async def _whole(service: Service, form: ResponseForm, entered: TextRequest) -> dict[str, Any]:
    try:
        async for new in service.outputs(entered):
            form.add(new)
    finally:
        service.leave([entered])
    form.end(entered.collected)
    return form.response


class ResponseEvents(RequestEvents):
    """The events of one response."""

    def __init__(self, service: Service, form: ResponseForm, entered: TextRequest) -> None:
        super().__init__(service, [entered])
        self._form, self._entered, self._outputs = form, entered, service.outputs(entered)

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
