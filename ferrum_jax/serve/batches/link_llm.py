"""LinkLLM: the server's engine as a batch job sees it, over a socket to an `EngineSide` of its own.

Its requests are FLEX: they take what live ones leave of the engine. A row that was in progress when the server was
killed begins anew, with the seed that it had, since no tokens of it are kept.
"""

import contextlib
import datetime
import itertools
import queue
import socket
import threading
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ferrum_jax.batch.batch_llm import RowAborted, RowRequest
from ferrum_jax.batch.journal.job_identity import JobRefused
from ferrum_jax.core.delta import Delta
from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.core.request import FLEX
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Prompt, take_apart
from ferrum_jax.io.watched_threads import start_thread
from ferrum_jax.openai.asked import GENERATES, TRANSCRIBES
from ferrum_jax.openai.bodies import named_content
from ferrum_jax.openai.readings import with_salt
from ferrum_jax.sampling_params import WHOLE_VOCABULARY, SamplingParams
from ferrum_jax.serve.http.service import wire_params
from ferrum_jax.serve.link.engine_client import EngineLost
from ferrum_jax.serve.link.wire import Message, reading_of, received, send
from ferrum_jax.serve.link.wire_images import wire_images
from ferrum_jax.tasks.task import NOT_BEGUN
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.tasks.transcription.transcriber import Transcriber, require_transcriber
from ferrum_jax.text.output_processor.choice_text import TokenTexts
from ferrum_jax.text.output_processor.collect import Collected, Collector, failure_of
from ferrum_jax.text.prompts import PromptEncoder
from ferrum_jax.text.structured.reading.message_stream import MessageForms

_GONE = "the engine's process has ended"
_WAIT_S = 0.1  # for an answer, before the job is asked whether it wants to end


class EngineGone(JobRefused):
    """The link is closed: no row is to blame, and the batch goes on when the server does."""


_Take = Callable[[Message], Any]  # of a message about a request: its answer, or None while there is none
_Begin = Callable[[int], tuple[Message, _Take]]  # of a request's id: what asks for it; raises ValueError


class LinkLLM:
    """One engine behind a socket; for one job at a time. facts: of the model, once it is ready."""

    def __init__(self, connection: socket.socket, *, on_end: Callable[[], None]) -> None:
        """on_end: called, on another thread, when the server ends or its engine is gone."""
        self.facts: Mapping[str, Any] = {}
        self.salt = ""  # of all prompts: whose cached prefixes they see
        self._connection, self._on_end = connection, on_end
        self._ready, self._lost = threading.Event(), threading.Event()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self._prompts = PromptEncoder(tokenizer=None, chat=None)
        self._collector = Collector(TokenTexts(None), 0)
        self._transcriber: Transcriber | None = None
        start_thread(self._read, lambda why: self._lose(), name="ferrum-batch-link")

    def wait(self) -> Mapping[str, Any]:
        """The model's facts, once the engine is ready. Raises EngineGone where it is gone before."""
        self._ready.wait()
        if self._lost.is_set():
            raise EngineGone(_GONE)
        return self.facts

    def open(self, prompts: PromptEncoder, transcriber: Transcriber | None = None) -> None:
        """Makes it answer: prompts become token ids by these. transcriber: of a model that writes down sounds."""
        self._transcriber = transcriber
        texts = TokenTexts(prompts.tokenizer, MessageForms.named(*self.facts["forms"]))
        self._prompts, self._collector = prompts, Collector(texts, self.facts["max_model_len"])

    # -- what a job asks for ---------------------------------------------------------------------------

    @property
    def identity(self) -> ModelIdentity:
        """What answers now, without adapters: no row of a batch names one."""
        values = self.facts["identity"]
        return ModelIdentity(**{**values, "end_tokens": tuple(values["end_tokens"]), "adapter": ""})

    def row_tasks(self, now: datetime.datetime) -> Callable[[RowRequest], _Begin]:
        def make(request: RowRequest) -> _Begin:
            if request.kind in (GENERATES, TRANSCRIBES):
                return _begin_text(self, request.key, request.content, request.params, now)
            return _begin_reading(self, request.kind, request.content)

        return make

    def hear(self, sound: str, params: TranscriptionParams) -> HeardSound:
        """A sound that a row names, read here. Raises ValueError for one that cannot be."""
        transcriber = require_transcriber(self._transcriber, self.facts["architecture"])
        return HeardSound.of(transcriber, transcriber.sources.of_row(sound), params)

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        """Nothing: the engine drafts from what it answers itself."""

    def progress(self) -> dict[str, tuple[float, float, float]]:
        """Nothing: answers come whole."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Nothing of its own: the engine's counters are those of live requests too."""
        return dict.fromkeys(("live", "num_blocks", "computed_tokens", "padded_tokens"), 0)

    # -- a session -------------------------------------------------------------------------------------

    def run(
        self,
        tasks: Iterable[tuple[int, Callable[[], _Begin]]],
        *,
        wants_partials: Callable[[], bool],
        most_running: Callable[[], float],
    ) -> Generator[tuple[int, Any], None, None]:
        """The answers as they come. Requests in progress count as without tokens."""
        source, is_dry = iter(tasks), False
        most = self.facts["num_rows"]
        running: dict[int, tuple[int, _Take]] = {}
        try:
            while True:
                while not is_dry and len(running) < min(most + most // 4, most_running()):
                    found = next(source, None)
                    if found is None:
                        is_dry = True
                        break
                    key, make = found
                    request_id = next(self._ids)
                    try:
                        message, take = make()(request_id)
                        self._send(message)
                    except EngineGone:
                        raise
                    except ValueError as error:
                        yield key, error
                        continue
                    running[request_id] = key, take
                if wants_partials():
                    yield from [(key, NOT_BEGUN) for key, _ in running.values()]
                if is_dry and not running:
                    return
                for request_id, message in self._next():
                    if request_id in running:  # else it was given up
                        answer = running[request_id][1](message)
                        if answer is not None:
                            yield running.pop(request_id)[0], answer
        finally:
            with contextlib.suppress(EngineGone):
                self._send(*(["abort", request_id] for request_id in running))

    def _next(self) -> Iterator[tuple[int, Message]]:
        """What comes within a moment, by the ids of requests. Raises EngineGone."""
        if self._lost.is_set():
            raise EngineGone(_GONE)
        try:
            message = self._messages.get(timeout=_WAIT_S)
        except queue.Empty:
            return
        if message[0] == "deltas":
            for fields in message[1]:
                yield fields[0], ["delta", Delta(*fields)]
        else:
            yield message[1], message

    # -- the link --------------------------------------------------------------------------------------

    def _read(self) -> None:
        """On a thread, so that nothing waits in the engine's process."""
        for message in received(self._connection):
            self._take(message)
        self._lose()

    def _send(self, *messages: Message) -> None:
        """Raises EngineGone, and ValueError for a message that is too long."""
        try:
            send(self._connection, messages)
        except OSError as error:
            raise EngineGone(_GONE) from error

    def _take(self, message: Message) -> None:
        kind = message[0]
        if kind in ("deltas", "done", "refused"):
            self._messages.put(message)
        elif kind in ("ready", "changed"):
            self.facts = {**self.facts, **message[1]}
            self._ready.set()
        elif kind == "end":
            self._on_end()
        elif kind == "beat" and message[1]["dead"] is not None:
            self._lose()

    def _lose(self) -> None:
        self._lost.set()
        self._ready.set()
        self._on_end()

    # -- prompts ---------------------------------------------------------------------------------------

    def encoded(
        self, key: int, prompt: Prompt, params: SamplingParams, now: datetime.datetime
    ) -> tuple[Collected, Sequence[int], dict[str, Any]]:
        """A text's request: what its output is made in, its token ids, and its options as they are sent."""
        if not self.facts["generates"]:
            raise ValueError(self.facts["refusal"])
        if params.prompt_logprobs == WHOLE_VOCABULARY:
            raise ValueError("prompt_logprobs is -1, the whole vocabulary of each token, which is not sent over HTTP")
        parts = take_apart(prompt)
        kept = params.most_prompt_tokens(self.facts["max_model_len"])
        found = self._prompts.encoded(prompt, now, kept=kept)
        told = RequestOptions(media=found.media, images=found.images).told_by(prompt)
        options = {"key": str(key), "cache_salt": self.salted(parts.cache_salt), "priority": FLEX}
        options |= {"streams": params.n > 1, **wire_images(found.images, found.media)}
        return self._collector.collected(found.token_ids, params, told), found.token_ids, options

    def salted(self, own: str) -> str:
        """The salt of a prompt's blocks: the batch's, and within it the row's own."""
        return f"{self.salt}\n{own}" if self.salt else own


def _begin_text(llm: LinkLLM, key: int, prompt: Prompt, params: SamplingParams, now: datetime.datetime) -> _Begin:
    def begin(request_id: int) -> tuple[Message, _Take]:
        collected, token_ids, options = llm.encoded(key, prompt, params, now)

        def take(message: Message) -> RequestOutput | ValueError | None:
            if message[0] != "delta":
                return _refusal(message)
            collected.take(message[1])
            if not collected.has_ended:
                return None
            output = collected.output()
            return failure_of(output) or output

        return ["add", request_id, list(token_ids), wire_params(params), options], take

    return begin


def _begin_reading(llm: LinkLLM, kind: int, content: Any) -> _Begin:
    def begin(request_id: int) -> tuple[Message, _Take]:
        sent = content if isinstance(content, dict) else _plain(content)
        sent = with_salt(sent, llm.salted(sent.get("cache_salt", "")))

        def take(message: Message) -> Any:
            return reading_of(kind, message[2]) if message[0] == "done" else _refusal(message)

        return ["read", request_id, kind, sent], take

    return begin


def _plain(prompt: Prompt) -> dict[str, Any]:
    """A text to read as JSON has it."""
    parts = take_apart(prompt)
    content = list(parts.content) if isinstance(parts.content, array) else parts.content
    return {**named_content(content), **parts.vector, **({"cache_salt": parts.cache_salt} if parts.cache_salt else {})}


def _refusal(message: Message) -> ValueError:
    """Why a request is not answered. Raises EngineLost where a step failed, and with it all that ran."""
    _, _, kind, why = message
    if kind == "failed":
        raise EngineLost(why)
    return RowAborted(why) if kind == "aborted" else ValueError(why)
