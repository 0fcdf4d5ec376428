"""The six doors by which a task comes in. Each takes `Asked` and gives the answer as its user gets it.

A task is described by a body: a mapping with what it is about (`prompt`, `input`, `file`) and options. Every door is
given the same words, so an option that one door knows and another refuses shows in the record. A refusal is
{"refused": its sentence and codes}; a door without any way to ask is ABSENT.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import http.client
import inspect
import io
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import openai
import pyarrow
from rich.console import Console

from ferrum_jax import LLM, AsyncLLM, SamplingParams
from ferrum_jax.batch.job import JobSettings, run_batch
from ferrum_jax.batch.ray import run_batch_on_ray
from tests.openai.streams import events_of, joined
from tests.serve.batch_input import begin, ended, lines_of
from tests.serve.running import Running
from tests.serve.test_transcriptions import BOUNDARY, form

ABSENT = "absent"
DOORS = ("LLM", "AsyncLLM", "HTTP", "rows", "batches", "Ray")
# By the task and the field that says what it is about: the path, and the method of LLM and AsyncLLM.
_VERBS = {
    ("generate", "prompt"): ("/v1/completions", "generate"),
    ("generate", "messages"): ("/v1/chat/completions", "chat"),
    ("log-probabilities", "prompt"): ("/v1/completions", "compute_logprobs"),
    ("transcribe", "file"): ("/v1/audio/transcriptions", "transcribe"),
    ("embed", "input"): ("/v1/embeddings", "embed"),
    ("score", "text_1"): ("/v1/score", "score"),
    ("score", "query"): ("/v1/rerank", "rerank"),
    ("classify", "input"): ("/classify", "classify"),
    ("reward", "input"): ("/pooling", "reward"),
}
_CONTENTS = {"compute_logprobs": ("prompt", "completions"), "score": ("text_1", "text_2")}
_OF_CHATS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"})


class Asked(NamedTuple):
    """One task. root: the folder below which `file` names sounds."""

    task: str
    body: Mapping[str, Any]
    root: Path

    @property
    def _verb(self) -> tuple[str, str]:
        return next(_VERBS[key] for name in self.body if (key := (self.task, name)) in _VERBS)

    @property
    def path(self) -> str:
        return self._verb[0]

    @property
    def method(self) -> str:
        return self._verb[1]

    def contents_and_options(self) -> tuple[list[Any], dict[str, Any]]:
        """What the task is about, sounds as the bytes of their files; and its options."""
        options = dict(self.body)
        names = _CONTENTS.get(self.method, (next(iter(options)),))
        contents = [options.pop(name) for name in names if name in options]
        return ([self.sounds(*contents)] if self.method == "transcribe" else contents), options

    def sounds(self, names: str | Sequence[str]) -> Any:
        """The bytes of a file, or of each."""
        return (self.root / names).read_bytes() if isinstance(names, str) else [self.sounds(name) for name in names]


def by_llm(llm: LLM, asked: Asked) -> Any:
    """The outputs of a call of LLM."""
    return _called(llm, asked, lambda call: call())


def by_async_llm(llm: AsyncLLM, asked: Asked) -> Any:
    """The outputs of a call of AsyncLLM, the last one of a stream."""

    async def answer(call: Callable[[], Any]) -> Any:
        found = call()
        return [output async for output in found][-1] if inspect.isasyncgen(found) else await found

    return _called(llm, asked, lambda call: asyncio.run(answer(call)))


def _called(llm: LLM | AsyncLLM, asked: Asked, run: Callable[[Callable[[], Any]], Any]) -> Any:
    contents, options = asked.contents_and_options()
    call = getattr(llm, asked.method, None)
    if call is None:
        return ABSENT
    try:
        if asked.method in ("generate", "chat"):
            own = {name: options.pop(name) for name in _OF_CHATS & options.keys()}
            contents, options = [*contents, SamplingParams(**options)], own
        return _plain(run(functools.partial(call, *contents, **options)))
    except (ValueError, TypeError, IndexError) as error:
        return {"refused": {"type": type(error).__name__, "message": str(error)}}


def _plain(value: Any) -> Any:
    """A Python answer as JSON has it; fields with their default are left out."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
        return {name: _plain(own) for name, (own, default) in fields.items() if own is not None and own is not default}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def by_http(server: Running, asked: Asked) -> Any:
    """The body that the server answers, a text, or what the events of a stream add up to."""
    body = dict(asked.body)
    if asked.task == "transcribe":
        fields = {name: json.dumps(value) if isinstance(value, bool) else str(value) for name, value in body.items()}
        sound = form(**{**fields, "file": asked.sounds(body["file"])})
        status, is_json, text = _posted(server, asked.path, sound, f"multipart/form-data; boundary={BOUNDARY}")
    else:
        status, is_json, text = _posted(server, asked.path, json.dumps(body).encode(), "application/json")
    if is_json:
        return json.loads(text) if status == 200 else {"refused": {"status": status, **json.loads(text)["error"]}}
    return _events(text) if body.get("stream") else {"text": text}


def _posted(server: Running, path: str, content: bytes, kind: str) -> tuple[int, bool, str]:
    """Status, whether the answer is JSON, and its text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, content, {"Content-Type": kind, "X-Request-Id": "asked"})
        found = connection.getresponse()
        return found.status, found.getheader("Content-Type", "") == "application/json", found.read().decode()


def _events(text: str) -> dict[str, Any]:
    """What events add up to: how many tokens an event happens to hold differs from run to run."""
    if not text.startswith('data: {"type"'):
        events = [json.loads(event) for event in events_of(text.encode())]
        return {"kinds": sorted({",".join(event) for event in events}), "joined": joined(events)}
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
    deltas = "".join(event.get("delta", "") for event in events)
    return {"kinds": sorted({event["type"] for event in events}), "deltas": deltas, "last": events[-1]}


Job = Mapping[str, Asked]  # by the names of its rows; all are of one path


def _rows(job: Job) -> bytes:
    lines = [
        {"custom_id": name, "method": "POST", "url": asked.path, "body": dict(asked.body)}
        for name, asked in job.items()
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _of_lines(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By the names of rows: the body of each line, or its error."""
    return {
        line["custom_id"]: line["response"]["body"] if line["response"] else {"refused": line["error"]}
        for line in lines
    }


def by_rows(llm: LLM, job: Job, folder: Path) -> dict[str, Any]:
    """What a batch job's output file has for each row."""
    return _job(functools.partial(run_batch, lambda start: llm), job, folder)


def by_ray(llm: LLM, job: Job, folder: Path) -> dict[str, Any]:
    """The same of a job whose rows are answered by an actor, over a `ray.data` in this process."""
    data = types.SimpleNamespace(from_items=lambda items, **_: _Dataset(items), ActorPoolStrategy=dict)
    ray = types.SimpleNamespace(data=data)
    with mock.patch.dict(sys.modules, {"ray": ray, "ray.data": data}):  # type: ignore[dict-item]
        return _job(functools.partial(run_batch_on_ray, lambda: llm, num_actors=1), job, folder)


class _Dataset:
    """Rows that an actor of this process answers."""

    def __init__(self, rows: list[dict[str, bytes]]) -> None:
        self._rows = rows

    def map_batches(self, actor: Any, *, fn_constructor_args: tuple, batch_size: int, **_: Any) -> _Dataset:
        own, rows = actor(*fn_constructor_args), self._rows
        batches = [pyarrow.Table.from_pylist(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
        return _Dataset([row for batch in batches for row in own(batch).to_pylist()])

    def iter_rows(self) -> Iterator[dict[str, bytes]]:
        return iter(self._rows)


def _job(run: Callable[..., int], job: Job, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    (folder / "in.jsonl").write_bytes(_rows(job))
    settings, console = JobSettings(names=["small"], now=lambda: 1000.0), Console(file=io.StringIO())
    paths = folder / "in.jsonl", folder / "out.jsonl"
    try:
        run(*paths, model="small", settings=settings, console=console)
    except ValueError as error:
        return {name: {"refused": {"message": str(error)}} for name in job}
    return _of_lines([json.loads(line) for line in paths[1].read_text().splitlines()])


def by_batch(server: Running, job: Job) -> dict[str, Any]:
    """What the files of a batch over HTTP have for each row."""
    path = next(iter(job.values())).path
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        try:
            done = ended(client, begin(client, _rows(job), endpoint=path))
        except openai.APIStatusError as error:
            return {name: {"refused": {"status": error.status_code, **error.body}} for name in job}  # type: ignore
        if done.status != "completed":
            said = [{"code": each.code, "message": each.message} for each in done.errors.data]
            return {name: {"refused": {"batch": done.status, "errors": said}} for name in job}
        return _of_lines([*lines_of(client, done.output_file_id), *lines_of(client, done.error_file_id)])
