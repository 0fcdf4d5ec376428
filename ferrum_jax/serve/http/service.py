"""Service: what all requests of a server share, and how a request gets from token ids to its outputs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.core.delta import Delta
from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.core.params_codec import params_to_json
from ferrum_jax.core.request import FLEX
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.images.decoding import Look, do_not_look
from ferrum_jax.inputs.prompt import Prompt, is_messages, take_apart
from ferrum_jax.openai.asked import AskedSound, AskedText
from ferrum_jax.openai.readings import AskedReading, contents_of, with_salt
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.serve.http.api_keys import ApiKey
from ferrum_jax.serve.http.fair_queue import FairQueue
from ferrum_jax.serve.http.fair_workers import FairWorkers
from ferrum_jax.serve.http.gate import Gate, Waiting
from ferrum_jax.serve.http.http_errors import HttpError
from ferrum_jax.serve.http.server_metrics import ServerMetrics
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link.engine_client import EngineClient, EngineDone, Reply, RequestRefused
from ferrum_jax.serve.link.wire import reading_of
from ferrum_jax.serve.link.wire_images import held_bytes, wire_images
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.transcriber import Transcriber
from ferrum_jax.text.output_processor.choice_text import NewText, TokenTexts
from ferrum_jax.text.output_processor.collect import Collected, Collector
from ferrum_jax.text.prompts import EncodedPrompt, PromptEncoder
from ferrum_jax.text.structured.reading.message_stream import MessageForms
from ferrum_jax.text.tokenizer import Tokenizer

_EXPECTED_TOKENS = 256  # that a request is thought to generate, where it may generate as many as there is room for


class TextRequest(Waiting):
    """One prompt of a request, on its way. collected: what came of it. last_token: when, by choice.

    on_slow: called where its reader is too slow. name: that its body gave.
    """

    def __init__(self, begin: Callable[[], Reply], collected: Collected, **turn: Any) -> None:
        super().__init__(begin, **turn)
        self.collected = collected
        self.last_token: dict[int, float] = {}
        self.on_slow: Callable[[], None] = lambda: None
        self.name: str | None = None


class Service:
    """client: the engine. prompts: set once the engine is ready; before that nothing is answered."""

    def __init__(self, client: EngineClient, settings: ServerSettings) -> None:
        self.client, self.settings = client, settings
        self.metrics = ServerMetrics(settings.names[0])
        self.prompts = PromptEncoder(tokenizer=None, chat=None)
        self.transcriber: Transcriber | None = None
        self.is_open = self.drains = False
        self.started = int(time.time())
        self.num_open = 0  # requests that generate or embed
        self.named: set[str] = set()  # ids that bodies of them gave
        self.gate, self._flex_gate = self._gate(), self._gate()  # no live request waits here for a FLEX one
        self._collector = Collector(TokenTexts(None), 0)
        self.bodies = FairWorkers("bodies", _BODY_THREADS)
        self._long_texts = FairWorkers("texts", _TEXT_THREADS)
        self._images = FairWorkers("images", _IMAGE_THREADS, may_begin=lambda: self._held_bytes < MOST_HELD_BYTES)
        self._held_bytes = 0  # pixels of images that wait for the engine
        client.on_stats = self._take_stats

    def _gate(self) -> Gate:
        most, most_tokens = self.settings.max_waiting, self.settings.max_waiting_tokens
        queue: FairQueue[Waiting] = FairQueue(max_requests=most, max_tokens=most_tokens)
        return Gate(queue, on_begin=lambda waiting: self.metrics.queue.observe(waiting.queue_s))

    def _gate_of(self, priority: int) -> Gate:
        return self._flex_gate if priority >= FLEX else self.gate

    @property
    def num_waiting(self) -> int:
        """Requests that the engine does not have yet."""
        return self.gate.num_waiting + self._flex_gate.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that those may need."""
        return self.gate.num_waiting_tokens + self._flex_gate.num_waiting_tokens

    def _take_stats(self, stats: Mapping[str, Any]) -> None:
        self.metrics.stats = stats

    def open(self, prompts: PromptEncoder, transcriber: Transcriber | None = None) -> None:
        """The engine is ready, and its `facts` are there. transcriber: of a model that writes down sounds."""
        self.transcriber = transcriber
        forms = MessageForms.named(*self.client.facts["forms"])
        self.prompts = prompts
        self._collector = Collector(TokenTexts(prompts.tokenizer, forms), self.client.facts["max_model_len"])
        self.gate.num_rows = self._flex_gate.num_rows = self.client.facts["num_rows"]
        self.is_open = True
        self.client.tell_opened()

    def sick(self) -> str | None:
        """Why this server does not answer as it should; None while it answers."""
        client, most = self.client, self.settings.watchdog_s
        if client.lost is not None:
            return client.lost
        if not client.ready.is_set():
            return None
        silence_s = max(time.monotonic() - client.last_beat, client.beat.get("silence_s", 0.0))
        return f"no step has ended for {silence_s:.0f} s while requests or calls wait" if silence_s > most else None

    def now(self) -> int:
        """Seconds since 1970, as answers tell when they were made."""
        return int(time.time())

    def require_ready(self) -> None:
        if self.drains:
            raise HttpError(503, "the server ends and takes no new requests", code="draining", headers=_SOON)
        if self.client.lost is not None:
            raise HttpError(503, self.client.lost, code="engine_failed")
        if not self.is_open:
            raise HttpError(503, "the model is still loading; ask again in a moment", code="starting", headers=_SOON)

    # -- adapters --------------------------------------------------------------------------------------

    @property
    def adapters(self) -> Sequence[str]:
        """Names of those that are loaded, which a request may give as its model."""
        return self.client.facts.get("adapters", ())

    async def told(self, kind: str, *rest: Any) -> Any:
        """What is told at the end of a message of `wire.py`; rest: as `EngineClient.ask` takes it.

        Raises RequestRefused for what cannot be done now.
        """
        reply = self.client.ask(kind, *rest)
        try:
            found = await reply.next()
            return found.result if isinstance(found, EngineDone) else None
        finally:
            self.client.end(reply)

    # -- tokens ----------------------------------------------------------------------------------------

    async def encode(
        self, prompts: Sequence[Prompt], key: ApiKey, *, kept: int | None = None, times: int = 1
    ) -> list[EncodedPrompt]:
        """Token ids and images of each, made in threads where these have images or long texts. Raises RequestRefused.

        kept, times: as of `PromptEncoder.encoded`.
        """

        def encoded(look: Look) -> list[EncodedPrompt]:
            found = []
            for prompt in prompts:
                look()
                found.append(self.prompts.encoded(prompt, kept=kept, times=times, look=look))
            return found

        try:
            length = sum(map(_length, prompts))
            if any(take_apart(prompt).seen for prompt in prompts):
                return await self._images.call(encoded, key=key.name, cost=length // _BYTES_OF_TOKEN + 1)
            if length < _LONG_TEXT:
                return encoded(do_not_look)
            return await self._long_texts.call(encoded, key=key.name, cost=length // _BYTES_OF_TOKEN)
        except ValueError as error:
            raise RequestRefused(str(error)) from error

    async def decode(self, token_ids: Sequence[int], key: ApiKey) -> str:
        """The text of token ids, special ones included, made in a thread where they are many. Raises RequestRefused."""
        tokenizer = self.tokenizer

        def decoded(look: Look) -> str:
            look()
            return tokenizer.decode(token_ids, skip_special_tokens=False)

        if len(token_ids) * _BYTES_OF_TOKEN < _LONG_TEXT:
            return decoded(do_not_look)
        return await self._long_texts.call(decoded, key=key.name, cost=len(token_ids))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's. Raises RequestRefused where it has none."""
        if self.prompts.tokenizer is None:
            raise RequestRefused("the model has no tokenizer; give and take token ids")
        return self.prompts.tokenizer

    # -- texts -----------------------------------------------------------------------------------------

    async def enter(self, asked: AskedText, key: ApiKey, request_id: str) -> list[TextRequest]:
        """The prompts of a request, queued.

        Raises RequestRefused, HttpError for an id that another has, and QueueFull with none of them queued.
        """
        if not self.client.facts["generates"]:
            raise RequestRefused(self.client.facts["refusal"])
        asked = dataclasses.replace(asked, params=asked.params.over(self.client.facts["identity"]["generation"]))
        kept = asked.params.most_prompt_tokens(self.client.facts["max_model_len"])
        encoded = await self.encode(asked.prompts, key, kept=kept)
        return self.queued(asked, list(zip(asked.prompts, encoded, strict=True)), key, request_id)

    def queued(
        self,
        asked: AskedText | AskedSound,
        prompts: Sequence[tuple[Prompt, EncodedPrompt]],
        key: ApiKey,
        request_id: str,
    ) -> list[TextRequest]:
        """The same of prompts that are encoded."""
        found = [
            self._text_request(asked, prompt, one, key, f"{request_id}-{place}")
            for place, (prompt, one) in enumerate(prompts)
        ]
        self.require_ready()
        if asked.request_id in self.named:
            message = f"request_id is {request_id!r}, which a request that runs has; give each its own, or leave it out"
            raise HttpError(400, message, param="request_id", code="request_id_in_use")
        self._gate_of(asked.priority).enter(found)
        for request in found:
            self._hold(request)
        self.metrics.prompt_tokens(sum(len(request.collected.prompt_token_ids) for request in found))
        if asked.request_id is not None:
            self.named.add(asked.request_id)
            found[0].name = asked.request_id
        return found

    def _text_request(
        self, asked: AskedText | AskedSound, prompt: Prompt, encoded: EncodedPrompt, key: ApiKey, seed_key: str
    ) -> TextRequest:
        params, parts, token_ids = asked.params, take_apart(prompt), encoded.token_ids
        kept = self._kept(token_ids, params)
        most = self.client.facts["max_model_len"] - len(kept)
        expected = min(_EXPECTED_TOKENS, most) if params.max_tokens is None else params.max_tokens
        options: dict[str, Any] = {"key": seed_key, "cache_salt": salted(key, parts.cache_salt)}
        if asked.is_flex:
            options["priority"] = asked.priority
        if asked.model is not None and asked.model in self.adapters:
            options["adapter"] = asked.model
        sent = wire_params(params)

        def begin() -> Any:
            images = wire_images(encoded.images, encoded.media)
            return self.client.ask("add", list(token_ids), sent, {**options, **images})

        told = RequestOptions(streams=asked.streams).told_by(prompt)
        collected = self._collector.collected(token_ids, params, told)
        return TextRequest(
            begin,
            collected,
            held_bytes=held_bytes(encoded.images),
            key=key.name,
            cost=len(kept) + params.n * expected,
            rows=params.n,
            priority=asked.priority,
        )

    def _kept(self, token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt as it will run. Raises RequestRefused where it is too long."""
        max_model_len = self.client.facts["max_model_len"]
        most = params.most_prompt_tokens(max_model_len)
        kept = token_ids if most is None else token_ids[-most:]
        total = len(kept) + (1 if params.max_tokens is None else params.max_tokens)
        if total > max_model_len:
            raise RequestRefused(
                f"this model's maximum context length is {max_model_len} tokens, its max_model_len; the prompt has "
                f"{len(kept)} tokens and max_tokens is {params.max_tokens}, together {total}; shorten one of them or "
                "set truncate_prompt_tokens"  # clients know a prompt that is too long by the first words
            )
        return kept

    async def outputs(self, request: TextRequest) -> AsyncIterator[NewText]:
        """What is new of each choice, until all have ended. Raises RequestRefused where the engine could not go on."""
        async for delta in self._deltas(request):
            for new in request.collected.push(delta):
                yield new

    async def whole(self, request: TextRequest) -> RequestOutput:
        """All of it, once it has ended."""
        async for delta in self._deltas(request):
            request.collected.take(delta)
        return request.collected.output()

    async def all_whole(self, requests: Sequence[TextRequest]) -> list[RequestOutput]:
        """The outputs of all, once they have ended. Where one fails none goes on."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.whole(request)) for request in requests]
            return [task.result() for task in tasks]
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            self.leave(requests)

    async def _deltas(self, request: TextRequest) -> AsyncIterator[Delta]:
        reply = await request.begun
        reply.on_slow = lambda: self._cut(request)
        try:
            while True:
                delta = await reply.next()
                assert isinstance(delta, Delta), "a text is answered by deltas"
                if delta.finish_reason == "error":
                    raise RequestRefused(str(delta.stop_reason))
                self._note(request, delta)
                yield delta
                if delta.is_last:
                    break
        finally:
            self.client.end(reply)
        self.metrics.whole.observe(time.monotonic() - request.arrived)

    def _hold(self, waiting: Waiting) -> None:
        """Counts the pixels that wait with it, until the engine has them or who asked has left."""
        if not waiting.held_bytes:
            return
        self._held_bytes += waiting.held_bytes

        def release(begun: asyncio.Future[Reply]) -> None:
            self._held_bytes -= waiting.held_bytes
            self._images.pump()

        waiting.begun.add_done_callback(release)

    def _cut(self, request: TextRequest) -> None:
        self.metrics.was_slow()
        request.on_slow()

    def _note(self, request: TextRequest, delta: Delta) -> None:
        self._time(request, delta)
        if delta.finish_reason is not None:
            self.metrics.ended(delta.finish_reason)

    def _time(self, request: TextRequest, delta: Delta) -> None:
        """Counts the delta's tokens, by the times at which the engine committed their steps."""
        for time_us in dict.fromkeys(delta.times_us):
            now, before = time_us / 1e6, request.last_token.get(delta.choice)
            if before is not None:
                self.metrics.between_tokens(now - before)
            elif not request.last_token:
                self.metrics.first_token(now - request.arrived)
            request.last_token[delta.choice] = now
        self.metrics.generated_tokens(len(delta.token_ids))

    def leave(self, requests: Sequence[TextRequest]) -> None:
        """Nobody waits for them any more."""
        for request in requests:
            self._leave(request)
            self.named.discard(request.name or "")

    def _leave(self, waiting: Waiting) -> None:
        self._gate_of(waiting.priority).leave(waiting)
        if waiting.begun.done() and not waiting.begun.cancelled() and waiting.begun.exception() is None:
            self.client.end(waiting.begun.result())

    # -- sounds ----------------------------------------------------------------------------------------

    async def hear(
        self, asked: AskedSound, transcriber: Transcriber, key: ApiKey, request_id: str
    ) -> tuple[HeardSound, list[TextRequest]]:
        """Reads a sound in a thread and queues a request for each of its windows. Raises as `enter`."""

        def heard(look: Look) -> tuple[HeardSound, list[tuple[Prompt, EncodedPrompt]]]:
            found = HeardSound.of(transcriber, asked.prompts[0], asked.how, look)
            return found, [(each.prompt, self.prompts.encoded(each.prompt)) for each in found.requests]

        try:
            cost = len(asked.prompts[0]) // _BYTES_OF_TOKEN + 1
            found, prompts = await self._images.call(heard, key=key.name, cost=cost)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        how = dataclasses.replace(asked, params=found.requests[0].sampling)
        return found, self.queued(how, prompts, key, request_id)

    # -- what is read ----------------------------------------------------------------------------------

    async def read(self, asked: AskedReading, key: ApiKey) -> list[Any]:
        """The output of each text or pair, in their order."""

        def waiting(content: Mapping[str, Any]) -> Waiting:
            sent = with_salt(content, salted(key, content.get("cache_salt", "")))
            cost = _length_within([sent.get(name) for name in _TEXTS_OF]) // _BYTES_OF_TOKEN
            cost += len(content.get("prompt_token_ids", ())) + 1
            begin = functools.partial(self.client.ask, "read", asked.kind, sent)
            return Waiting(begin, key=key.name, cost=cost, priority=asked.priority)

        entered = [waiting(content) for content in contents_of(asked)]
        self.require_ready()
        self._gate_of(asked.priority).enter(entered)
        try:
            return [await self._reading(asked.kind, each) for each in entered]
        finally:
            for each in entered:
                self._leave(each)

    async def _reading(self, kind: int, waiting: Waiting) -> Any:
        found = await (await waiting.begun).next()
        assert isinstance(found, EngineDone), "what is read is answered by an output"
        return reading_of(kind, found.result)


_TEXTS_OF = ("prompt", "messages", "query", "document")  # fields of what is read
_LONG_TEXT = 20_000  # characters
_BYTES_OF_TOKEN = 4
_BODY_THREADS = 1  # one at a time: what is decoded takes many times its bytes of memory
_TEXT_THREADS = _IMAGE_THREADS = 2
MOST_HELD_BYTES = 1 << 30
_SOON = {"Retry-After": "1"}


def _length(prompt: Prompt) -> int:
    content: Any = take_apart(prompt).content
    return len(content) if isinstance(content, str) else _length_within(content) if is_messages(content) else 0


def _length_within(value: object) -> int:
    """Characters of all texts in a value of JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_length_within, value.values()))
    return sum(map(_length_within, value)) if isinstance(value, list | tuple) else 0


def salted(key: ApiKey, own: str) -> str:
    """The salt of a prompt's blocks: the key's, and within it the request's own."""
    return f"{key.salt}\n{own}" if key.salt else own


def wire_params(params: SamplingParams) -> dict[str, Any]:
    """The parameters as the engine gets them: text is made here, unless a stop string needs it there as well."""
    return params_to_json(params) | {"detokenize": bool(params.stop), "echo": False}


@contextlib.contextmanager
def counted(service: Service) -> Iterator[None]:
    """A request that generates or embeds is open meanwhile."""
    service.num_open += 1
    try:
        yield
    finally:
        service.num_open -= 1
