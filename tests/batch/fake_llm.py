"""A stand-in for the engine: answers are a function of prompt and parameters, in shuffled order of completion."""

import dataclasses
import datetime
import hashlib
import json
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ferrum_jax.batch.batch_llm import RowRequest
from ferrum_jax.batch.input.formats import Row, parse_line
from ferrum_jax.core.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput, ScoreOutput
from ferrum_jax.core.request_options import RequestOptions
from ferrum_jax.inputs.identity import ModelIdentity
from ferrum_jax.inputs.prompt import take_apart
from ferrum_jax.openai.asked import EMBEDS, SCORES
from ferrum_jax.sampling_params import SamplingParams
from ferrum_jax.tasks.task import EngineRequest

IDENTITY = ModelIdentity(
    weights="00",
    tokenizer=None,
    chat_template=None,
    end_tokens=(),
    vectors="{}",
    dtype="float32",
    kv_dtype="float32",
    max_model_len=100,
    invariant=True,
    environment={"mesh": "tp=1", "jaxlib": "1"},
)
CHOICE = CompletionOutput(
    index=0, text="", token_ids=(), cumulative_logprob=None, logprobs=None, finish_reason="length", stop_reason=None
)


def output_of(token_ids: tuple[int, ...], logprobs: tuple[dict[int, Logprob], ...]) -> RequestOutput:
    choice = dataclasses.replace(CHOICE, token_ids=token_ids, logprobs=logprobs)
    return RequestOutput(request_id=0, prompt=None, prompt_token_ids=(1,), outputs=(choice,), num_cached_tokens=0)


def row(**fields: Any) -> Row:
    found = parse_line(json.dumps({"custom_id": "a", **fields}).encode(), 1)
    assert isinstance(found, Row), found
    return found


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


class FakeLLM:
    """Holds up to `width` requests and gives each a token a step; prompts longer than `limit` are refused.

    Tokens are a function of row, choice and position, so what goes on after some tokens ends as what never stopped.
    start: of the job. on_step: called with this before each step.
    """

    def __init__(
        self,
        start: object = None,
        *,
        identity: ModelIdentity = IDENTITY,
        order: int = 0,
        width: int = 4,
        limit: int = 1000,
        on_step: "Callable[[FakeLLM], None]" = lambda llm: None,
    ):
        self.random, self.width, self.limit, self.on_step = random.Random(order), width, limit, on_step
        self.learnt: list[str] = []  # texts that tokens may be drafted from
        self.salts: list[str] = []  # of the calls that brought them
        self.num_pulled = self.num_answered = self.num_resumed = self.most_ahead = self.num_steps = 0
        self.running: list[_Running] = []
        self.is_closed = False
        self.identity = identity
        self.now: datetime.datetime | None = None

    def row_tasks(self, now: datetime.datetime) -> Callable[[RowRequest], RowRequest]:
        self.now = now
        return lambda request: _Asked(*request)

    def run(
        self,
        tasks: Iterable[tuple[int, Callable[[], RowRequest]]],
        *,
        wants_partials: Callable[[], bool] = lambda: False,
        most_running: Callable[[], float] = lambda: math.inf,
    ) -> Iterator[tuple[int, Any]]:
        source, self.running = (make() for _, make in tasks), []
        try:
            while True:
                yield from self._fill(source, most_running)
                if wants_partials():
                    yield from [(row.key, row.output(finished=False)) for row in self.running]
                if not self.running:
                    return
                yield from self._step()
        finally:
            self.is_closed = True

    def learn(self, texts: Iterable[str], *, cache_salt: str) -> None:
        self.learnt += texts
        self.salts.append(cache_salt)

    def stats(self) -> dict[str, int]:
        return {"live": len(self.running), "num_blocks": 8, "computed_tokens": self.num_steps, "padded_tokens": 999}

    def progress(self) -> dict[str, tuple[float, float, float]]:
        return {str(row.key): (len(row.prompt), len(row.prompt), row.num_written) for row in self.running}

    def _fill(self, source: Iterator[RowRequest], most_running: Callable[[], float]) -> Iterator[tuple[int, Any]]:
        """Texts that are read are answered at once."""
        while len(self.running) < min(self.width, most_running()):
            request = next(source, None)
            if request is None:
                return
            self.num_pulled += 1
            key, kind, content, params, before = request
            if kind in _READ:
                yield key, _READ[kind](content, self.limit)
                continue
            prompt = take_apart(content).content
            if len(prompt) > self.limit:
                yield key, ValueError(f"the prompt has {len(prompt)} tokens, more than {self.limit}")
                continue
            self.num_resumed += bool(before)
            self.running.append(_Running(key, prompt, params, before))
            self.most_ahead = max(self.most_ahead, len(self.running))

    def _step(self) -> Iterator[tuple[int, RequestOutput]]:
        self.num_steps += 1
        self.on_step(self)
        for row in self.random.sample(self.running, len(self.running)):
            if self.random.random() < 0.8:  # the others are preempted for a step
                row.advance()
            if row.is_done:
                self.running.remove(row)
                self.num_answered += 1
                yield row.key, row.output(finished=True)


class _Asked(RowRequest):
    """With the requests that a model's task has."""

    @property
    def requests(self) -> list[EngineRequest]:
        ids = answer(take_apart(self.content).content, self.params).prompt_token_ids
        return [EngineRequest(ids, self.params, RequestOptions())]


class _Running:
    def __init__(self, key: int, prompt: Any, params: SamplingParams, before: Sequence[CompletionOutput]):
        self.key, self.prompt, self._whole = key, prompt, answer(prompt, params)
        self._ends = [len(choice.token_ids) for choice in self._whole.outputs]
        self._lengths = [len(choice.token_ids) for choice in before] or [0] * len(self._ends)
        for choice, whole in zip(before, self._whole.outputs, strict=False):
            length = len(choice.token_ids)
            assert choice.token_ids == whole.token_ids[:length], "a row resumed from the tokens of another"
            assert (choice.finish_reason is not None) == (length == len(whole.token_ids))
            assert [_plain(e) for e in choice.logprobs or ()] == [_plain(e) for e in (whole.logprobs or ())[:length]]

    @property
    def is_done(self) -> bool:
        return self._lengths == self._ends

    @property
    def num_written(self) -> int:
        return sum(self._lengths)

    def advance(self) -> None:
        self._lengths = [min(length + 1, end) for length, end in zip(self._lengths, self._ends, strict=True)]

    def output(self, *, finished: bool) -> RequestOutput:
        choices = tuple(map(_cut, self._whole.outputs, self._lengths))
        return dataclasses.replace(self._whole, outputs=choices, finished=finished)


def _vector(prompt: object, limit: int) -> EmbeddingOutput | ValueError:
    ids = tuple(answer(prompt, SamplingParams()).prompt_token_ids)
    if len(ids) > limit:
        return ValueError(f"the prompt has {len(ids)} tokens, more than {limit}")
    return EmbeddingOutput(prompt=None, prompt_token_ids=ids, embedding=np.asarray(ids, np.float32)[:3] / np.float32(7))


def _score(pair: Any, limit: int) -> ScoreOutput | ValueError:
    ids = tuple(map(ord, pair["query"] + pair["document"]))
    if len(ids) > limit:
        return ValueError(f"the pair has {len(ids)} tokens, more than {limit}")
    return ScoreOutput(prompt_token_ids=ids, score=1 / len(ids))


_READ: dict[int, Callable[[Any, int], Any]] = {EMBEDS: _vector, SCORES: _score}


def _plain(entry: dict[int, Logprob]) -> dict[int, tuple[float, int]]:
    return {token: (found.logprob, found.rank) for token, found in entry.items()}


def _cut(choice: CompletionOutput, length: int) -> CompletionOutput:
    if length == len(choice.token_ids):
        return choice
    return dataclasses.replace(
        choice,
        token_ids=choice.token_ids[:length],
        text=choice.text[:length],
        logprobs=choice.logprobs and choice.logprobs[:length],
        finish_reason=None,
    )


def answer(prompt: object, params: SamplingParams) -> RequestOutput:
    """Tokens that differ by prompt, seed and choice, with logprobs where they are asked for."""
    prompt_ids = (
        tuple(prompt)
        if isinstance(prompt, list | array) and isinstance(prompt[0], int)
        else tuple(str(prompt).encode())
    )
    choices = tuple(_choice(prompt_ids, params, index) for index in range(params.n))
    tops = None
    if params.prompt_logprobs is not None:
        tops = (None, *({token: Logprob(logprob=-1.5, rank=1)} for token in prompt_ids[1:]))
    return RequestOutput(
        request_id=0,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=prompt_ids,
        outputs=choices,
        num_cached_tokens=len(prompt_ids) // 2,
        prompt_logprobs=tops,
    )


def _choice(prompt_ids: tuple[int, ...], params: SamplingParams, index: int) -> CompletionOutput:
    seed = repr((prompt_ids, params.seed if params.temperature else None, index)).encode()
    length = max(1, min(params.max_tokens or 8, 64) - index)  # choices end at different steps
    digest = hashlib.blake2b(seed, digest_size=length).digest()
    token_ids = tuple(97 + byte % 26 for byte in digest)
    logprobs = None
    if params.logprobs is not None:
        logprobs = tuple(
            {token: Logprob(logprob=-0.1 - byte / 3, rank=1, decoded_token=chr(token))}
            for token, byte in zip(token_ids, digest, strict=True)
        )
    text = "".join(map(chr, token_ids))
    return dataclasses.replace(CHOICE, index=index, text=text, token_ids=token_ids, logprobs=logprobs)
