"""EngineSide: what of a server runs beside the engine. It takes messages of `wire.py` and sends others back.

Texts that are read are tokenised here, where the checkpoint's own rules for them are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ferrum_jax.async_llm import live_stats
from ferrum_jax.core.delta import Delta
from ferrum_jax.core.params_codec import params_of_json
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine_thread import Aborted, Answer, EngineThread, Ticket
from ferrum_jax.engine.thread_tasks import Parts, TaskTicket, ThreadTasks, finished
from ferrum_jax.io.watched_threads import WatchedPool, start_thread
from ferrum_jax.llm import LLM
from ferrum_jax.serve.control import changing_facts, control
from ferrum_jax.serve.folders_below import folder_below
from ferrum_jax.serve.link.outbox import Outbox
from ferrum_jax.serve.link.wire import Message, wire_reading
from ferrum_jax.serve.link.wire_images import with_images
from ferrum_jax.tasks.embedder import UNTRAINED
from ferrum_jax.tasks.reading import ReadingTasks
from ferrum_jax.tasks.task import Task
from ferrum_jax.tasks.transcription.whisper_transcriber import WhisperTranscriber

_BEAT_S = 0.25


class EngineSide:
    """outbox: where messages wait for HTTP. roots: as `ServerSettings` has them. waits: as a `Ticket` has it."""

    def __init__(
        self,
        llm: LLM,
        thread: EngineThread,
        outbox: Outbox,
        roots: tuple[str | None, str | None] = (None, None),
        *,
        waits: bool = False,
    ) -> None:
        self._waits = waits
        self._adapter_root, self._weights_root = roots
        self._loads = WatchedPool(self.fail, name="ferrum-adapters")
        self._reads = WatchedPool(self.fail, name="ferrum-texts")
        self.thread = thread
        self._llm = llm
        self._outbox = outbox
        self._send = outbox.put
        self._ids: dict[Ticket, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._tasks = ThreadTasks(thread, lambda: llm.calls.collector, waits=waits)
        self._readings: dict[int, TaskTicket] = {}
        self._reader = ReadingTasks(llm.model.tasks)
        self._stats_asked = False
        self._told_version = 0  # of the weights
        self.opened = threading.Event()  # HTTP takes requests
        self.failed: str | None = None  # why it carries nothing any more
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        thread.after_errands.append(self._tell_weights)

    def begin(self) -> None:
        """Says that requests may come."""
        self._told_version = self._llm.weights_version
        self._send([["ready", facts_of(self._llm)]])
        self._beats = start_thread(self._beat, self.fail, name="ferrum-beat")

    def fail(self, why: str) -> None:
        """The server has failed: nothing is taken any more, and `/health` says why."""
        self.failed = why
        self._tell_beat()

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed.set()
        self.thread.after_errands.remove(self._tell_weights)
        if self._beats is not None:
            self._beats.join()
        for pool in (self._loads, self._reads):
            pool.close()
        for ticket in list(self._ids):
            self.thread.abort(ticket)
        for reading in list(self._readings.values()):
            self._tasks.leave(reading)

    def take(self, message: Message) -> None:
        """Does what a message asks for; one that cannot be done is refused, and the next ones are taken."""
        kind, *rest = message
        try:
            self._do(kind, *rest)
        except Exception as error:
            self._refuse(rest[0], error)

    def _do(self, kind: str, *rest: Any) -> None:
        if kind == "add":
            self._add(*rest)
        elif kind == "read":
            self._read(*rest)
        elif kind == "abort":
            self._abort(*rest)
        elif kind == "load_adapter":
            self._loads.submit(self._change, rest[0], functools.partial(self._load_adapter, *rest[1:]))
        elif kind == "unload_adapter":
            self._loads.submit(self._change, rest[0], functools.partial(self._llm.unload_adapter, *rest[1:]))
        elif kind == "control":
            self._control(*rest)
        elif kind == "opened":
            self.opened.set()
        else:
            raise ValueError(f"the message {kind!r} is none that an engine takes")

    def _add(
        self, request_id: int, token_ids: list[int], params: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        sampling, options = params_of_json(params), {"streams": True, **with_images(options)}
        self.thread.add(self._ticket(request_id), token_ids, sampling, RequestOptions(**options))

    def _ticket(self, request_id: int) -> Ticket:
        ticket = Ticket(self._answer, waits=self._waits)
        self._ids[ticket], self._tickets[request_id] = request_id, ticket
        return ticket

    def _abort(self, request_id: int) -> None:
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._forget(ticket)
            self.thread.abort(ticket)
        elif (reading := self._readings.pop(request_id, None)) is not None:
            self._tasks.leave(reading)

    def _forget(self, ticket: Ticket) -> int | None:
        """The id of a request that ends now; None if it ended before."""
        request_id = self._ids.pop(ticket, None)
        self._tickets.pop(-1 if request_id is None else request_id, None)
        return request_id

    def _answer(self, answers: Sequence[tuple[Ticket, Answer]]) -> None:
        """On the engine's thread: what one step gave."""
        self._tell_weights()
        deltas: list[Delta] = []
        messages: list[Message] = []
        for ticket, answer in answers:
            if isinstance(answer, Delta) and not answer.is_last:
                request_id = self._ids.get(ticket)
            else:
                request_id = self._forget(ticket)
            if request_id is None:
                continue
            if isinstance(answer, Exception):
                messages.append(_refusal(request_id, answer))
            else:
                deltas.append(answer._replace(id=request_id, beside=None))
        for request_id in self._outbox.add(deltas) if deltas else ():
            self._abort(request_id)  # before the next step
        if messages:
            self._send(messages)

    # -- changes ---------------------------------------------------------------------------------------

    def _change(self, request_id: int, change: Callable[[], Any]) -> None:
        """Adapters change in a thread of their own, since files are read."""
        try:
            found = change()
        except BaseException as error:
            self._refuse(request_id, error)
            return
        self._send([["changed", changing_facts(self._llm)], ["done", request_id, found]])

    def _refuse(self, request_id: int, error: BaseException) -> None:
        refusal = _refusal(request_id, error)
        if refusal[2] == "failed":
            logging.getLogger("ferrum_jax.serve").error("a request of the engine failed", exc_info=error)
        self._send([refusal])

    def _tell_weights(self) -> None:
        """On the engine's thread, before all that other weights answer, whoever gave them."""
        if self._told_version != self._llm.weights_version:
            self._told_version = self._llm.weights_version
            self._reader = ReadingTasks(self._llm.model.tasks)  # a query that was read before is read again
            self._send([["changed", changing_facts(self._llm)]])

    def _control(self, request_id: int, verb: str, arguments: Mapping[str, Any]) -> None:
        """Answers when it is done: nothing waits here, since one verb may end another's waiting."""
        begun = control(self._llm, self.thread, verb, arguments, self._weights_root)
        begun.add_done_callback(lambda done: self._change(request_id, done.result))

    def _load_adapter(self, name: str, path: str, replaces: bool) -> None:
        """Raises ValueError for a path outside the root, and for a name that is there and is not to be replaced."""
        if self._adapter_root is None:
            raise ValueError("adapters are not loaded over HTTP here; give the server --adapter-root DIR")
        folder = folder_below(self._adapter_root, path)
        if name in self._llm.model.adapters.names and not replaces:
            raise ValueError(f"lora_name is {name!r}, which is loaded already; set load_inplace to replace it")
        self._llm.load_adapter(name, folder)

    # -- what is read ----------------------------------------------------------------------------------

    def _read(self, request_id: int, kind: int, content: Mapping[str, Any]) -> None:
        """Reads a text or a pair. A thread makes its tokens: a long one holds up no other message."""
        task: Task[Any] | None = None

        def answered(parts: Parts | Exception) -> None:
            if self._readings.pop(request_id, None) is None:  # who asked has left
                return
            self._tell_weights()
            try:
                assert task is not None or isinstance(parts, Exception), "a task that has not begun gives no parts"
                answer = finished(task, parts)  # type: ignore[arg-type]
            except Exception as error:
                self._send([_refusal(request_id, error)])
            else:
                self._send([["done", request_id, wire_reading(answer)]])

        def begin() -> None:
            nonlocal task
            if ticket.has_left:
                return
            try:
                task = self._reader(kind, content)
            except Exception as error:
                answered(error)
            else:
                self._tasks.begin(ticket, task)

        self._readings[request_id] = ticket = TaskTicket(answered)
        self._reads.submit(begin)

    # -- how it goes -----------------------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._tell_beat()
            if not self._stats_asked:
                self._stats_asked = True
                self.thread.call(self._tell_stats)

    def _tell_beat(self) -> None:
        thread = self.thread
        dead = self.failed or (None if thread.failed is None else str(thread.failed))
        facts = {"silence_s": thread.silence_s, "num_open": thread.num_open, "dead": dead}
        self._send([["beat", facts | {"num_steps": thread.num_steps}]])

    def _tell_stats(self) -> None:
        self._stats_asked = False
        with contextlib.suppress(OSError):
            self._send([["stats", live_stats(self._llm)]])


def _refusal(request_id: int, error: BaseException) -> Message:
    invalid = isinstance(error, ValueError | OSError)
    kind = "invalid" if invalid else "aborted" if isinstance(error, Aborted) else "failed"
    return ["refused", request_id, kind, str(error)]


def _read_from(folder: Path, sources: Any) -> dict[str, Any]:
    """The folder of a processor's files, and where images or sounds may come from."""
    return {"folder": str(folder), "hosts": list(sources.hosts), "root": sources.root}


def facts_of(llm: LLM) -> dict[str, Any]:
    """What HTTP has to know of a model."""
    model, transcriber = llm.model, llm.model.opened.texts.transcriber
    images, sounds = model.prompts.images, model.prompts.sounds
    heard = sounds and {**_read_from(sounds.folder, sounds.sources), "max_frames": sounds.max_frames}
    by_whisper = isinstance(transcriber, WhisperTranscriber)
    return {
        "architecture": llm.spec.architecture,
        "images": images and _read_from(images.folder, images.sources),
        "heard": heard,
        "sounds": _read_from(transcriber.folder, transcriber.sources) if by_whisper else None,
        "max_model_len": llm.max_model_len,
        "num_rows": llm.config.num_rows * llm.ledger.num_shards,
        "generates": model.generates,
        "refusal": "" if model.generates else model.tasks.refusal,  # of what is to be generated
        "vocab_size": llm.spec.vocab_size,
        "startup_s": llm.startup_s,
        **changing_facts(llm),
        "scores": model.opened.scorer is not None,
        "compares": model.opened.scorer is None and model.embedder.compares,
        "of_vectors": [] if model.embedder.compares else [UNTRAINED],  # what an answer with vectors warns of
        "texts": None if model.folder is None else str(model.folder),
        "forms": model.opened.forms.names,
    }
