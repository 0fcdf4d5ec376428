"""Garbage in every field of every body: each is refused by name, or served; none is a fault of the server's own."""

import functools

import pytest

from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.bodies import asked_reading, asked_text
from ferrum_jax.openai.body_fields import fields_of
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.openai.response_body import asked_response
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import running

DEEP: list = []
for _ in range(90):
    DEEP = [DEEP]
GARBAGE = (
    *(None, True, False, 0, -1, 5, 2**31, 2**70, 0.5, -1e308, "", "x", "\x00", "\ud800", "𝄞" * 50),
    *([], [[]], [None], [{}], ["x"], [5], [-1], [2**40], DEEP, {}, {"": None}, {"type": "x"}, {"x": [1]}, {"5": "a"}),
    *([{"type": "function"}], [{"type": "function", "function": []}], {"type": "json_schema", "json_schema": []}),
    *(
        [{"role": "user", "content": [{"type": []}]}],
        [{"role": [], "content": ""}],
        {"type": "function", "function": 5},
    ),
)
MESSAGES = [{"role": "user", "content": "x"}]
ITEM = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}"}
FUNCTION = {"name": "go", "parameters": {"type": "object"}}


def calls(value) -> dict:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}]}


def schema(value) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def of_text(is_chat):
    return lambda body, limits: asked_text(body, limits, is_chat=is_chat)


ENDPOINTS = {
    "/v1/completions": (of_text(False), {"prompt": "x", "max_tokens": 1}, "completion"),
    "/v1/chat/completions": (of_text(True), {"messages": MESSAGES, "max_tokens": 1}, "chat"),
    "/v1/responses": (asked_response, {"input": "x", "max_output_tokens": 1}, "response"),
    "/v1/embeddings": (functools.partial(asked_reading, kind="embedding"), {"input": "x"}, "embedding"),
    "/v1/score": (functools.partial(asked_reading, kind="score"), {"text_1": "x", "text_2": "y"}, "score"),
    "/v1/rerank": (functools.partial(asked_reading, kind="rerank"), {"query": "x", "documents": ["y"]}, "rerank"),
}
NESTED = {
    "/v1/chat/completions": [
        *({"messages": [MESSAGES[0] | {name: value}]} for name in ("role", "content", "name", "tool_calls", "reasoning")
          for value in GARBAGE),
        *map(calls, GARBAGE),
        *map(schema, GARBAGE),
        *({"tools": [{"type": "function", "function": FUNCTION | {name: value}}]}
          for name in ("name", "parameters", "strict") for value in GARBAGE),
        *({"structured_outputs": {name: value}} for name in ("json", "choice", "regex", "tools") for value in GARBAGE),
    ],
    "/v1/responses": [
        *({"input": [ITEM | {name: value}]} for name in ("type", "call_id", "name", "arguments") for value in GARBAGE),
        *({"text": {"format": value}} for value in GARBAGE),
        *({"reasoning": {"effort": value}} for value in GARBAGE),
        *({"tools": [{"type": "function", "name": "go", name: value}]} for name in ("name", "parameters", "type")
          for value in GARBAGE),
        *({"tool_choice": {"type": "function", "name": value}} for value in GARBAGE),
    ],
}  # fmt: skip


def bodies(path):
    _, good, kind = ENDPOINTS[path]
    for field in (*fields_of(kind, "http"), "store", "background"):
        for value in GARBAGE:
            yield {**good, field: value}
    for changed in NESTED.get(path, ()):
        yield {**good, **changed}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_garbage_is_refused_by_name_or_understood(path):
    read, good, _ = ENDPOINTS[path]
    read(good, BodyLimits())
    refused = []
    for body in bodies(path):
        try:
            read(body, BodyLimits())
        except FieldError as error:
            refused.append(body)
            assert error.param is None or error.param.split(".")[0].split("[")[0] in body, (body, str(error))
    assert len(refused) > 50


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
def test_garbage_that_is_understood_is_served_or_refused(path):
    read, _, _ = ENDPOINTS[path]
    with running(ServerSettings(names=("small",), timeout_s=120)) as server:
        for body in bodies(path):
            try:
                read(body, BodyLimits())
            except FieldError:
                continue
            content = body | {"timeout": body.get("timeout", 60)}
            status, _, answer = server.ask(path, content)
            assert status in (200, 400, 404), (body, answer)
