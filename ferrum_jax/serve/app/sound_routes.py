"""/v1/audio/transcriptions and /v1/audio/translations: a form with a file in, what is said in it out."""

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from ferrum_jax.core.outputs import ABORTED, CompletionOutput, Transcription
from ferrum_jax.openai.bodies import asked_sound
from ferrum_jax.openai.body_fields import fields_of
from ferrum_jax.serve.app.text_routes import warning_headers
from ferrum_jax.serve.http.event_stream import RequestEvents
from ferrum_jax.serve.http.exchange import Exchange
from ferrum_jax.serve.http.service import Service, TextRequest
from ferrum_jax.serve.link.engine_client import RequestAborted, RequestRefused
from ferrum_jax.tasks.transcription import forms
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.transcriber import require_transcriber

_FILES = frozenset({"file"})


async def transcriptions(request: Request) -> Response:
    """What is said in a sound."""
    return await _answer(Exchange(request), kind="transcription")


async def translations(request: Request) -> Response:
    """What is said in a sound, in English."""
    return await _answer(Exchange(request), kind="translation")


async def _answer(exchange: Exchange, *, kind: str) -> Response:
    service = exchange.service
    ask = functools.partial(asked_sound, kind=kind)
    asked = await exchange.asked_by_form(ask, fields_of(kind, "http"), _FILES)
    exchange.model(asked.model)
    try:
        transcriber = require_transcriber(service.transcriber, service.client.facts["architecture"])
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    hear = service.hear(asked, transcriber, exchange.key, exchange.id)
    heard, requests = await exchange.unless_left(hear, asked.timeout_s)
    sound = RunningSound(service, heard, requests)
    headers = warning_headers(asked.warnings)
    if asked.streams:
        return await sound.stream(exchange, headers, asked.timeout_s)
    found = await exchange.unless_left(sound.whole(), asked.timeout_s)
    form = asked.response_format
    if form in forms.OF_TEXT:
        return Response(forms.as_text(found, form), media_type=forms.OF_TEXT[form], headers=dict(headers))
    return exchange.json(forms.as_object(found, form, asked.how.temperature), headers)


class RunningSound(RequestEvents):
    """The windows of one sound, which run side by side, and its text in their order."""

    def __init__(self, service: Service, heard: HeardSound, requests: Sequence[TextRequest]) -> None:
        super().__init__(service, requests)
        self._heard = heard

    async def whole(self) -> Transcription:
        """All of it, once it has ended."""
        await self._service.all_whole(self._requests)
        return self._transcription()

    def _transcription(self) -> Transcription:
        return self._heard.transcription([self._answer(place) for place in range(len(self._requests))])

    def _answer(self, place: int) -> CompletionOutput:
        """That to a window which has ended. Raises RequestAborted for one that was cut."""
        found = self._requests[place].collected.output().outputs[0]
        if found.finish_reason == "abort":
            raise RequestAborted(ABORTED)
        return found

    async def _all(self) -> AsyncGenerator[bytes, None]:
        text = self._heard.growing()
        num_whole = num_told = 0  # windows, and parts of them
        async for token_ids in self._tokens():
            new = text.end_window() if token_ids is None else text.push(token_ids)
            if new:
                yield forms.delta_event(new)
            if token_ids is None:
                parts = self._heard.segments(num_whole, self._answer(num_whole), first_id=num_told)
                for part in parts:
                    yield forms.segment_event(part)
                num_whole, num_told = num_whole + 1, num_told + len(parts)
        yield forms.done_event(self._transcription())

    async def _tokens(self) -> AsyncIterator[Sequence[int] | None]:
        """New tokens of each window after the other, and None at its end. All are read as they come."""
        found: list[asyncio.Queue[Sequence[int] | Exception | None]] = [asyncio.Queue() for _ in self._requests]

        async def read(place: int) -> None:
            try:
                async for new in self._service.outputs(self._requests[place]):
                    found[place].put_nowait(tuple(new.token_ids))
                found[place].put_nowait(None)
            except Exception as error:
                found[place].put_nowait(error)

        self._readers = [asyncio.create_task(read(place)) for place in range(len(self._requests))]
        for queue in found:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item is None:
                    break
