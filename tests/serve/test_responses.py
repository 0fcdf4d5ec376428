"""/v1/responses as OpenAI's own client reads and sends items; tests/openai has what each body is answered."""

from __future__ import annotations

import json

from ferrum_jax.serve.bodies.response_input import input_messages
from tests.openai.text_bodies import PLACES
from tests.serve.running import request
from tests.serve.test_tools import Answer


def test_a_call_is_answered_with_the_items_that_came(client):
    asked = {"model": "small", "max_output_tokens": 60}
    asked["tools"] = [{"type": "function", "name": "go", "parameters": PLACES, "strict": True}]
    named = {"type": "function", "name": "go"}
    first = client.responses.create(**asked, input="Go?", tool_choice=named)
    (call,) = first.output
    assert call.name == "go" and json.loads(call.arguments)["to"] in ("Köln", "Rom")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "there"}
    asked["max_output_tokens"] = 2
    assert client.responses.create(**asked, input=[{"role": "user", "content": "Go?"}, call, result]).output_text


def test_a_pydantic_model_is_parsed(client):
    found = client.responses.parse(model="small", input="Well?", text_format=Answer, max_output_tokens=200)
    assert found.output_parsed.word in ("yes", "no")


def test_items_of_an_assistant_are_one_message():
    call = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}", "id": "fc", "status": "completed"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        call,
        call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    found = input_messages(items)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "assistant"]
    assert found[0]["content"] == "ab" and found[2] == {"role": "tool", "tool_call_id": "c", "content": "ok"}
    assert (found[1]["reasoning"], found[1]["content"], len(found[1]["tool_calls"])) == ("hm", "c", 2)


def test_who_leaves_a_stream_ends_what_runs_for_them(server):
    asked = {"input": "x", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with server.connect() as connection:
        connection.sendall(request("/v1/responses", json.dumps(asked).encode()))
        assert connection.recv(100)
    server.wait_until_idle(30.0)
