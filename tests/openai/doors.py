"""The doors by which a body comes in: HTTP whole, HTTP as a stream, a row of a job, and a call of LLM.

Each answers with a value that is compared with the recorded one. What differs from run to run (times, fingerprints,
cached tokens) has a fixed form in it, and the bytes are proven to be the plain JSON of the value.
"""

import asyncio
import base64
import http.client
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ferrum_jax import LLM, SamplingParams
from ferrum_jax.async_llm import AsyncLLM
from ferrum_jax.batch.job import JobSettings, run_batch
from tests.openai.sections import Bodies
from tests.openai.streams import events_of, joined
from tests.serve.running import Running

_whole = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
_event = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_line = json.JSONEncoder(allow_nan=False).encode
_FIXED = {"created": 0, "created_at": 0, "completed_at": 0, "system_fingerprint": "", "cached_tokens": 0, "line": 0}
_NUM_PLACES = 5


def ask(server: Running, path: str, body: Mapping[str, Any]) -> tuple[int, str, bytes]:
    """Status, the header Warning, and the bytes of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    try:
        headers = {"Content-Type": "application/json", "X-Request-Id": "asked"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        found = connection.getresponse()
        return found.status, found.getheader("Warning") or "", found.read()
    finally:
        connection.close()


def over_http(server: Running, path: str, body: Mapping[str, Any]) -> Any:
    return _answered(*ask(server, path, body))


def streamed(server: Running, path: str, body: Mapping[str, Any]) -> Any:
    """The events added up; the error where there are none."""
    status, warning, content = ask(server, path, {**body, "stream": True})
    if status != 200 or not content.startswith((b"data: ", b"event: ")):
        return _answered(status, warning, content)
    events = events_of(content)
    return _with(warning, fixed(joined([_read(event, _event) for event in events])))


def _answered(status: int, warning: str, content: bytes) -> Any:
    found = _read(content.decode(), _whole)
    return _with(warning, fixed(found if status == 200 else {"status": status, **found["error"]}))


def _with(warning: str, found: Any) -> Any:
    return {"Warning": warning, **found} if warning else found


def by_job(llm: LLM, path: str, bodies: Bodies, folder: Path) -> dict[str, Any]:
    """The answers of one job, by the names of its rows."""
    rows = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name, body in bodies.items()]
    folder.mkdir(parents=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = JobSettings(names=["small"], now=lambda: 1000.0)
    paths, console = (folder / "in.jsonl", folder / "out.jsonl"), Console(file=io.StringIO())
    try:
        run_batch(lambda start: llm, *paths, model="small", settings=settings, console=console)
    except ValueError as error:
        return {name: {"error": "the job ends", "message": str(error)} for name in bodies}
    lines = [_read(line, _line) for line in paths[1].read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == list(bodies)
    return {line["custom_id"]: fixed(_of_line(line)) for line in lines}


def _of_line(line: dict[str, Any]) -> Any:
    """The body of a line, or its error. The names of both in the line's envelope are those of the row."""
    response, error = line["response"], line["error"]
    assert list(line) == ["id", "custom_id", "response", "error"] and line["id"].startswith("batch_req_")
    if response is None:
        return error
    own = line["id"].removeprefix("batch_req_")
    assert error is None and (response["status_code"], response["request_id"]) == (200, f"req_{own}")
    return response["body"]


def by_call(llm: LLM | AsyncLLM, path: str, body: Mapping[str, Any]) -> Any:
    """What a call of LLM or AsyncLLM gives or says; None where it has no argument for a field of the body."""
    call = _CALLS.get(path)
    try:
        return None if call is None else call(llm, dict(body))
    except (ValueError, TypeError, IndexError) as error:
        return {"error": type(error).__name__, "message": str(error)}


def _texts(llm: LLM | AsyncLLM, body: dict[str, Any]) -> Any:
    prompt = body.pop("prompt", None)
    salt = body.pop("cache_salt", None)
    if prompt is None or not body.keys() <= _SAMPLING:
        return None
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    names = ["prompt" if isinstance(each, str) else "prompt_token_ids" for each in prompts]
    salted = [{name: each, "cache_salt": salt} for name, each in zip(names, prompts, strict=True)]
    given, params = salted if salt is not None else prompts, _params(body)
    if isinstance(llm, LLM):
        return _choices(llm.generate(given, params, progress=False))
    return _choices(asyncio.run(_each(lambda prompt: _last(llm.generate(prompt, params)), given)))


async def _each(ask: Callable[[Any], Awaitable[Any]], prompts: Sequence[Any]) -> Sequence[Any]:
    return await asyncio.gather(*map(ask, prompts))


async def _last(outputs: AsyncIterator[Any]) -> Any:
    return [output async for output in outputs][-1]


def _chats(llm: LLM | AsyncLLM, body: dict[str, Any]) -> Any:
    messages = body.pop("messages", None)
    given = {name: body.pop(name) for name in _CHAT_ARGUMENTS & body.keys()}
    body = {"max_tokens": None, **body}
    if messages is None or isinstance(llm, AsyncLLM) or not body.keys() <= _SAMPLING or "logprobs" in body:
        return None
    return _choices(llm.chat(messages, _params(body), progress=False, **given))


def _params(fields: dict[str, Any]) -> SamplingParams:
    bias = fields.get("logit_bias")
    if isinstance(bias, dict) and all(map(str.isdecimal, bias)):
        fields["logit_bias"] = {int(token): value for token, value in bias.items()}
    return SamplingParams(**fields)


def _choices(outputs: Any) -> Any:
    return [
        {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": list(choice.token_ids),
            "num_prompt_tokens": len(output.prompt_token_ids),
            **({} if choice.message is None else {"message": _said(choice.message)}),
        }
        for output in outputs
        for choice in output.outputs
    ]


def _said(message: Any) -> dict[str, Any]:
    calls = [[call.name, call.arguments] for call in message.tool_calls]
    return {"content": message.content, "reasoning": message.reasoning, "calls": calls}


def _vectors(llm: LLM | AsyncLLM, body: dict[str, Any]) -> Any:
    given = body.pop("input", None)
    if body.get("encoding_format") in ("float", "base64"):  # of the answer's JSON alone
        del body["encoding_format"]
    if given is None or not body.keys() <= {"prompt_name", "pooling", "normalize", "truncate"}:
        return None
    if isinstance(llm, LLM):
        found: Sequence[Any] = llm.embed(given, progress=False, **body)
    elif "prompt_name" in body:
        return None
    else:
        several = isinstance(given, list) and given and isinstance(given[0], str | list)
        found = asyncio.run(_each(lambda text: llm.embed(text, **body), given if several else [given]))
    return fixed([output.embedding.tolist() for output in found])


def _scores(llm: LLM | AsyncLLM, body: dict[str, Any]) -> Any:
    left, right = ([t] if isinstance(t := body.pop(name, None), str) else t for name in ("text_1", "text_2"))
    if not isinstance(left, list) or not isinstance(right, list) or len(left) not in (1, len(right)):
        return None
    if isinstance(llm, AsyncLLM) or not body.keys() <= {"truncate", "instruction"}:
        return None
    pairs = list(zip(left * len(right) if len(left) == 1 else left, right, strict=True))
    return fixed([output.score for output in llm.score(pairs, progress=False, **body)])


_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_CHAT_ARGUMENTS = {"tools", "tool_choice", "parallel_tool_calls", "continue_final_message", "add_generation_prompt"}
_CHAT_ARGUMENTS |= {"chat_template_kwargs", "add_special_tokens"}
_CALLS: dict[str, Callable[[LLM | AsyncLLM, dict[str, Any]], Any]] = {
    "/v1/completions": _texts,
    "/v1/chat/completions": _chats,
    "/v1/embeddings": _vectors,
    "/v1/score": _scores,
}


def _read(text: str, write: Callable[[Any], str]) -> Any:
    """The value of a JSON text, which is how `write` writes it."""
    found = json.loads(text)
    assert write(found) == text
    return found


def fixed(value: Any, name: str = "") -> Any:
    """The value, without what depends on the run: times, cached tokens, the last digits of numbers."""
    if name in _FIXED and value is not None:
        return _FIXED[name]
    if isinstance(value, dict):
        return {key: fixed(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [fixed(each) for each in value]
    if isinstance(value, float):
        return round(value, _NUM_PLACES)
    if name == "embedding" and isinstance(value, str):
        content = base64.b64decode(value)
        assert base64.b64encode(content).decode() == value
        return {"base64": fixed(np.frombuffer(content, "<f4").tolist())}
    return re.sub(r"\bline \d+:", "line N:", value) if name == "message" and isinstance(value, str) else value
