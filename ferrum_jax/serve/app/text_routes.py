"""Texts in: an answer or a stream of events out, or what a model reads out of each, as vectors, scores and classes."""

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.openai.answers import usage_of
from ferrum_jax.openai.asked import EMBEDS, REWARDS, AskedText
from ferrum_jax.openai.bodies import asked_reading, asked_text
from ferrum_jax.openai.readings import num_read, reading_answer
from ferrum_jax.openai.response_body import asked_response
from ferrum_jax.serve.http.answer_forms import DONE, AnswerForm
from ferrum_jax.serve.http.event_stream import RequestEvents
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.response_form import ResponseForm
from ferrum_jax.serve.http.service import Service, TextRequest
from ferrum_jax.serve.link.engine_client import EngineLost, RequestRefused
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


def reads(kind: str, says: str) -> Callable[[Request], Awaitable[Response]]:
    """Answers bodies of a kind of READING. says: what the answer has."""

    async def answer(request: Request) -> Response:
        return await _read(Exchange(request), kind)

    answer.__doc__ = says
    return answer


embeddings = reads("embedding", "The vectors of texts.")
score = reads("score", "vLLM's score: of each text of text_2 beside that of text_1.")
rerank = reads("rerank", "Documents in the order of how well they fit a query.")
classify = reads("classification", "vLLM's classes: of each text, by a model with a head for them.")
pooling = reads("reward", "The reward of each text, by a reward model.")


async def _read(exchange: Exchange, kind: str) -> Response:
    service = exchange.service
    asked = await exchange.asked(lambda body, limits: asked_reading(body, limits, kind=kind))
    head: dict[str, Any] = {"model": exchange.model(asked.model)}
    outputs = await exchange.unless_left(service.read(asked, exchange.key), asked.timeout_s)
    service.metrics.prompt_tokens(num_read(outputs))
    warnings = asked.warnings
    if asked.kind == EMBEDS:
        warnings = (*service.client.facts["of_vectors"], *warnings)
    else:
        name = "pool" if asked.kind == REWARDS else "classify" if kind == "classification" else kind
        head |= {"id": f"{name}-{exchange.id}", "created": service.now()}
    try:
        answer = reading_answer(asked, outputs, head, asked.right if kind == "rerank" else ())
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    return exchange.json(answer, warning_headers(warnings))
