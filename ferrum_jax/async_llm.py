"""AsyncLLM: an LLM for tasks of asyncio, of one event loop or many.

The engine runs on a thread of its own (`engine_thread.py`). Each request has a mailbox of deltas, which its task makes
one output of, since every output has all text so far: a task that reads slowly has fewer, and never holds up the
engine. A task that is cancelled, or leaves its loop over the outputs, ends its rows before the next step.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ferrum_jax.config import EngineConfig
from ferrum_jax.core.outputs import (
    ClassOutput,
    EmbeddingOutput,
    RequestOutput,
    RewardOutput,
    ScoreOutput,
    SequenceLogprobs,
    Transcription,
)
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.engine.engine_thread import Answer as FromThread
from ferrum_jax.engine.engine_thread import EngineThread, Ticket
from ferrum_jax.engine.thread_tasks import Parts, TaskTicket, ThreadTasks, finished
from ferrum_jax.inputs.images.decoding import Look, Stopped
from ferrum_jax.inputs.params.transcription_params import TranscriptionParams
from ferrum_jax.inputs.prompt import Message, Prompt, listed, take_apart
from ferrum_jax.llm import LLM, NewWeights
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.calls.arguments import BEAM_SEARCH, ENCODE, GET_METRICS, checked, require_one, with_tools
from ferrum_jax.tasks.logprobs import Completion, score_params
from ferrum_jax.tasks.scorer import Pair, paired
from ferrum_jax.tasks.task import Answer, EngineRequest, MakeTask, Task
from ferrum_jax.tasks.transcription.heard_sound import HeardSound
from ferrum_jax.text.output_processor.collect import Collected

Key = TypeVar("Key")
Result = TypeVar("Result")

_IMAGE_THREADS = 2


class Refused(RuntimeError):
    """Nothing new is taken: the engine drains or is closed."""


class AsyncLLM:
    """An LLM whose requests come and go one by one, from any number of tasks and threads.

    model, config, others: as of `LLM`. Opening one blocks; within a running loop, open it in a thread and use `over`.
    Close it, or use it in `async with`, so that its thread ends.
    """

    encode, beam_search, get_metrics = ENCODE, BEAM_SEARCH, GET_METRICS

    def __init__(self, model: str, config: EngineConfig | None = None, **others: Any) -> None:
        self._take(LLM(model, config, **others))

    @classmethod
    def over(cls, llm: LLM) -> AsyncLLM:
        """One over an open LLM, which then is this one's: nobody else may have requests running on it."""
        found = cls.__new__(cls)
        found._take(llm)
        return found

    def _take(self, llm: LLM) -> None:
        self.llm = llm
        self.thread = EngineThread(llm.calls)
        self._tasks = ThreadTasks(self.thread, lambda: llm.calls.collector)
        self._keys = itertools.count()
        self._open: set[_Mailbox | TaskTicket] = set()
        self._drains = self._is_closed = False
        self._images = concurrent.futures.ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix="ferrum-images")

    async def _prepared(self, prompt: Prompt, options: RequestOptions, sampling: SamplingParams) -> EngineRequest:
        """As `TaskMaker.request`, in a thread; texts wait for no images, and a cancelled task decodes no further."""
        parts = take_apart(prompt)
        return await self._in_thread(
            lambda look: self.llm.model.tasks.request(prompt, sampling, options, look=look),
            self._images if parts.seen else None,  # asyncio's own
        )

    async def _in_thread(
        self, call: Callable[[Look], Result], pool: concurrent.futures.ThreadPoolExecutor | None
    ) -> Result:
        """What `call` gives, which looks whether its task was cancelled."""
        has_left = threading.Event()

        def look() -> None:
            if has_left.is_set():
                raise Stopped

        def called() -> Result:
            look()
            return call(look)

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, called)
        finally:
            has_left.set()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The output as it grows: each has all text so far, and the last one is finished.

        prompt: see `ferrum_jax.inputs.prompt`; chat messages too. request_id: for `abort`, and the key of its seed
        where it has none: equal requests of one id draw equal tokens. priority: lower runs first.
        Raises ValueError for a request that cannot be served, EngineFailed if a step fails, and Refused after `drain`.
        """
        require_one(prompt, "generate")
        key = f"request-{next(self._keys)}" if request_id is None else request_id
        options = RequestOptions(key=key, priority=priority, streams=True)
        params = sampling_params or self.llm.model.default_params
        request = await self._prepared(prompt, options, params)
        with self._mailbox(request_id, *request) as mailbox:
            while not mailbox.ended and (output := await mailbox.next()) is not None:
                yield output

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **how: Any,
    ) -> AsyncIterator[RequestOutput]:
        """The answer to one conversation as it grows, as of `generate`; the other arguments are those of `LLM.chat`."""
        params = sampling_params or self.llm.model.default_params
        params = with_tools(params, tools, tool_choice, parallel_tool_calls)
        prompt = {"messages": messages, "tools": None if tool_choice == "none" else tools, **how}
        return self.generate(prompt, params, request_id=request_id, priority=priority)

    async def run(
        self, tasks: Iterable[tuple[Key, MakeTask[Answer]]]
    ) -> AsyncGenerator[tuple[Key, Answer | ValueError], None]:
        """(key, answer) of each task in the order in which they end, beside the requests that run.

        tasks: as of `LLM.run`; all are begun. A refused one gives its ValueError. Raises as `generate`.
        """
        self._refuse_at_end()
        ended: asyncio.Queue[tuple[Key, Any]] = asyncio.Queue()
        whole = TaskTicket(lambda parts: None)  # what drains waits for all
        many, running = list(tasks), set[asyncio.Task[None]]()

        async def answer(key: Key, task: Task[Answer]) -> None:
            try:
                ended.put_nowait((key, await self._answer(task, begun=True)))
            except Exception as error:
                ended.put_nowait((key, error))

        async def begin() -> None:
            for key, make in many:
                try:
                    task = await asyncio.to_thread(make)
                except Exception as error:
                    ended.put_nowait((key, error))
                else:
                    running.add(asyncio.create_task(answer(key, task)))

        running.add(asyncio.create_task(begin()))
        self._open.add(whole)
        try:
            for _ in many:
                key, found = await ended.get()
                if isinstance(found, Exception) and not isinstance(found, ValueError):
                    raise found
                yield key, found
        finally:
            self._open.discard(whole)
            for each in running:
                each.cancel()

    async def _answer(self, task: Task[Answer], *, begun: bool = False) -> Answer:
        """The answer of one task; one that is cancelled ends its requests. begun: it is of a call that runs."""
        self._refuse_at_end(begun=begun)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Parts | Exception] = loop.create_future()

        def put(parts: Parts | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # its loop is closed, and nobody reads
                loop.call_soon_threadsafe(lambda: answered.done() or answered.set_result(parts))

        ticket = TaskTicket(put)
        self._open.add(ticket)
        self._tasks.begin(ticket, task)
        try:
            return finished(task, await answered)
        finally:
            self._open.discard(ticket)
            self._tasks.leave(ticket)

    async def _in_order(self, tasks: Sequence[MakeTask[Answer]]) -> list[Answer]:
        """The answers in the order of their tasks. Raises ValueError naming the prompt that is refused."""
        found: dict[int, Answer] = {}
        async with contextlib.aclosing(self.run(enumerate(tasks))) as answers:
            async for number, answer in answers:
                if isinstance(answer, ValueError):
                    raise ValueError(f"prompt {number}: {answer}") from answer
                found[number] = answer
        return [found[number] for number in sorted(found)]

    async def transcribe(self, sound: Any, *, priority: int = 0, **how: Any) -> Transcription:
        """What is said in one sound, whose windows run side by side. how: as of `TranscriptionParams`.

        The rest is as in `LLM.transcribe`. Raises as `generate`.
        """
        model, params = self.llm.model, checked(TranscriptionParams)(**how)
        name, transcriber = f"sound-{next(self._keys)}", model.transcriber

        def made(look: Look) -> Task[Transcription]:
            return model.tasks.transcription(HeardSound.of(transcriber, sound, params, look), name, priority)

        return await self._answer(await self._in_thread(made, self._images))

    @checked
    async def embed(
        self,
        prompt: Prompt,
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> EmbeddingOutput:
        """The vector of a text; the rest is as in `LLM.embed`."""
        require_one(prompt, "embed")
        how = {"prompt_name": prompt_name, "pooling": pooling, "normalize": normalize, "truncate": truncate}
        embedder = self.llm.model.embedder
        return await self._answer(await asyncio.to_thread(embedder.task, prompt, embedder.params(**how), how))

    @checked
    async def score(
        self,
        pairs: Sequence[Pair] | str,
        documents: str | Sequence[str] | None = None,
        *,
        truncate: bool = False,
        instruction: str | None = None,
    ) -> list[ScoreOutput]:
        """As `LLM.score`, beside the requests that run."""
        make = self.llm.model.tasks.pairs(truncate, instruction)
        made = pairs if documents is None else paired(pairs, documents)
        return await self._in_order([partial(make, pair) for pair in made])

    @checked
    async def classify(self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False) -> list[ClassOutput]:
        """As `LLM.classify`, beside the requests that run."""
        make = self.llm.model.tasks.classification(truncate)
        return await self._in_order([partial(make, prompt, "") for prompt in listed(prompts)])

    @checked
    async def reward(self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False) -> list[RewardOutput]:
        """As `LLM.reward`, beside the requests that run."""
        make = self.llm.model.tasks.reward(truncate)
        return await self._in_order([partial(make, prompt, "") for prompt in listed(prompts)])

    @checked
    async def compute_logprobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        completions: Sequence[Completion] | None = None,
        *,
        top: int = 0,
        mode: str = "raw",
        sampling_params: SamplingParams | None = None,
    ) -> list[SequenceLogprobs]:
        """As `LLM.compute_logprobs`, beside the requests that run."""
        model = self.llm.model
        params = score_params(top, mode, sampling_params, model.default_params)
        tasks = await asyncio.to_thread(model.tasks.logprobs, prompts, completions, mode, params)
        return await self._in_order([lambda task=task: task for task in tasks])

    async def update_weights(self, state: NewWeights, **how: Any) -> int:
        """As `LLM.update_weights`, between two steps; while requests run, say what becomes of them: `requests=`."""
        return await self._between_steps(lambda: self.llm.update_weights(state, **how))

    async def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """As `LLM.load_adapter`; the files are read in a thread, and no step waits for them."""
        self._refuse_at_end()
        await asyncio.to_thread(self.llm.load_adapter, name, path)

    async def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        self.llm.unload_adapter(name)

    async def pause(self, requests: str = "keep") -> None:
        """Returns once nothing runs; what is asked from then on waits for `resume`.

        requests: what becomes of those that run: "keep" has them go on later where they were, "wait" lets them end
        first, "abort" ends them. Raises ValueError for another word, and where `resume` comes before all have ended.
        """
        self._refuse_at_end()
        await asyncio.wrap_future(self.thread.pause(requests))

    async def resume(self) -> None:
        """Undoes `pause`."""
        await asyncio.wrap_future(self.thread.resume())

    @property
    def is_paused(self) -> bool:
        """Whether nothing new begins."""
        return self.thread.is_paused

    async def sleep(self, level: int = 1) -> dict[str, int]:
        """As `LLM.sleep`."""
        return await self._between_steps(lambda: self.llm.sleep(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLM.wake_up`."""
        await self._between_steps(lambda: self.llm.wake_up(tags))

    async def _between_steps(self, call: Callable[[], Any]) -> Any:
        self._refuse_at_end()
        return await asyncio.wrap_future(self.thread.call(call))

    async def abort(self, request_id: str) -> None:
        """Ends the requests of this id; their loops end with the output that they had. Unknown ones are ignored."""
        boxes = [box for box in list(self._open) if isinstance(box, _Mailbox)]
        for mailbox in [box for box in boxes if box.request_id == request_id]:
            self.thread.abort(mailbox.ticket)
            mailbox.stop()

    async def stats(self) -> dict[str, Any]:
        """What `LLM.stats` gives, taken between two steps, with the rows that run and the requests that wait."""
        return await asyncio.wrap_future(self.thread.call(lambda: live_stats(self.llm)))

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new and waits for what runs; whether all of it ended in time. What did not goes on."""
        self._drains = True
        until = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while self._open:
            if until is not None and asyncio.get_running_loop().time() >= until:
                return False
            await asyncio.sleep(0.01)
        return True

    def close(self) -> None:
        """Ends what runs, with EngineFailed, and the thread."""
        self._drains = self._is_closed = True
        self._images.shutdown(wait=False, cancel_futures=True)
        self.thread.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    @contextlib.contextmanager
    def _mailbox(
        self, request_id: str | None, token_ids: Sequence[int], sampling: SamplingParams, options: RequestOptions
    ) -> Iterator[_Mailbox]:
        """That of a request which runs from now on, and no longer than it is held."""
        self._refuse_at_end()
        collected = self.llm.calls.collector.collected(token_ids, sampling, options)
        mailbox = _Mailbox(asyncio.get_running_loop(), request_id, collected)
        self._open.add(mailbox)
        self.thread.add(mailbox.ticket, token_ids, sampling, options)
        try:
            yield mailbox
        finally:
            self._open.discard(mailbox)
            if not mailbox.ended:
                self.thread.abort(mailbox.ticket)

    def _refuse_at_end(self, *, begun: bool = False) -> None:
        if self._is_closed or (self._drains and not begun):
            raise Refused("the engine drains and takes no new requests; ask another one")


class _Mailbox:
    """What comes of one request, for one task. ended: the last of it was taken, or none will come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request_id: str | None, collected: Collected) -> None:
        self.request_id, self.ended = request_id, False
        self.ticket = Ticket(self._put)
        self._loop, self._collected = loop, collected
        self._lock = threading.Lock()
        self._waiting: list[FromThread] = []
        self._filled = asyncio.Event()

    def _put(self, answers: Sequence[tuple[Ticket, FromThread]]) -> None:
        """On the engine's thread. The task is woken once for all that comes before it looks."""
        with self._lock:
            is_woken = bool(self._waiting)
            self._waiting += [answer for _, answer in answers]
        if not is_woken:
            self._wake()

    def stop(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed, and nobody reads
            self._loop.call_soon_threadsafe(self._filled.set)

    async def next(self) -> RequestOutput | None:
        """The next output; None where it was stopped. Raises what the engine raised."""
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if isinstance(answer, Exception):
                self.ended = True
                raise answer
            self._collected.take(answer)
        if self.ended:
            return None
        assert waiting, "a task is woken for a delta"
        self.ended = self._collected.has_ended
        return self._collected.output()


def live_stats(llm: LLM) -> dict[str, Any]:
    """What `LLM.stats` gives, with `num_running` rows and `num_waiting` requests."""
    return {**llm.stats(), **llm.calls.engine.live()}
