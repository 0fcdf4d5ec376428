"""/v1/completions and /v1/chat/completions: a body in, an answer or a stream of events out."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.answers import usage_of
from ferrum_jax.openai.asked import AskedText
from ferrum_jax.openai.bodies import asked_text
from ferrum_jax.serve.http.answer_forms import DONE, AnswerForm
from ferrum_jax.serve.http.event_stream import RequestEvents
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.service import Service, TextRequest
from ferrum_jax.text.output_processor.choice_text import NewText

_MOST_WARNINGS, _MOST_WARNING = 20, 100  # in a header, and characters of each


async def completions(request: Request) -> Response:
    """What comes after a text."""
    return await _answer(Exchange(request), is_chat=False)


async def chat_completions(request: Request) -> Response:
    """The answer to a conversation."""
    return await _answer(Exchange(request), is_chat=True)


async def _answer(exchange: Exchange, *, is_chat: bool) -> Response:
    service = exchange.service
    asked = await exchange.asked(functools.partial(asked_text, is_chat=is_chat))
    model = exchange.model(asked.model, generates=True)
    exchange.take_id(asked.request_id)
    fingerprint = service.client.facts["fingerprint"]
    form = AnswerForm(asked, request_id=exchange.id, model=model, fingerprint=f"fp_{fingerprint}")
    requests = await exchange.unless_left(service.enter(asked, exchange.key, exchange.id), asked.timeout_s)
    headers = warning_headers(asked.warnings)
    if not asked.streams:
        outputs = await exchange.unless_left(service.all_whole(requests), asked.timeout_s)
        return exchange.json(form.whole(outputs), headers)
    return await TextChunks(service, asked, form, requests).stream(exchange, headers, asked.timeout_s)


def warning_headers(warnings: Sequence[str]) -> Mapping[str, str]:
    """What was ignored, as RFC 7234's header has it: names come from who asks, so nothing of them ends a header."""
    if not warnings:
        return {}
    named = [re.sub(r'[^ -~]|["\\]', "?", each)[:_MOST_WARNING] for each in warnings[:_MOST_WARNINGS]]
    if len(warnings) > _MOST_WARNINGS:
        named.append(f"{len(warnings) - _MOST_WARNINGS} more were ignored")
    return {"Warning": ", ".join(f'199 - "{each}"' for each in named)}


class TextChunks(RequestEvents):
    """The events of one answer."""

    def __init__(self, service: Service, asked: AskedText, form: AnswerForm, requests: Sequence[TextRequest]) -> None:
        super().__init__(service, requests)
        self._asked, self._form = asked, form

    async def _all(self) -> AsyncGenerator[bytes, None]:
        asked, form = self._asked, self._form
        opened: set[int] = set()
        async for place, new in self._outputs():
            index = place * asked.params.n + new.index
            usage = self._usage() if asked.usage_in_every_chunk else None
            opening = b""
            if index not in opened:
                opened.add(index)
                opening = form.opening(
                    index, (self._requests[place].collected.prompt or "") if asked.echo else "", usage
                )
            chunk = opening + form.chunk(index, new, usage)
            if chunk:
                yield chunk
        if asked.includes_usage:
            yield form.usage_chunk(self._usage())
        yield DONE

    async def _outputs(self) -> AsyncIterator[tuple[int, NewText]]:
        """What is new, with the place of its prompt."""
        if len(self._requests) == 1:
            async for new in self._service.outputs(self._requests[0]):
                yield 0, new
            return
        found: asyncio.Queue[tuple[int, NewText] | Exception | None] = asyncio.Queue(maxsize=1)

        async def read(place: int) -> None:
            try:
                async for new in self._service.outputs(self._requests[place]):
                    await found.put((place, new))
                await found.put(None)
            except Exception as error:
                await found.put(error)

        self._readers = [asyncio.create_task(read(place)) for place in range(len(self._requests))]
        left = len(self._readers)
        while left:
            item = await found.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item

    def _usage(self) -> dict[str, Any]:
        requests = [request.collected for request in self._requests]
        generated = sum(len(choice.token_ids) for request in requests for choice in request.choices)
        return usage_of(
            sum(len(request.prompt_token_ids) for request in requests),
            generated if self._asked.generates else 0,
            sum(request.num_cached_tokens for request in requests),
        )
