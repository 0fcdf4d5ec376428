"""/v1/responses: items and events as OpenAI's own client reads them; what needs something stored is refused by name."""

from __future__ import annotations

import json

import openai
import pytest

from ferrum_jax.openai.asked import BodyLimits
from ferrum_jax.openai.errors import FieldError
from ferrum_jax.serve.bodies.response_body import asked_response
from ferrum_jax.serve.bodies.response_input import input_messages
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import request, running
from tests.serve.test_tools import CALL, PLACES, Answer

TOOLS = [{"type": "function", "name": "go", "parameters": PLACES, "strict": True}]
SAID = f"<think>\nhm\n</think>\n\nSure.\n{CALL}"
EVENTS = [
    *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
    *("reasoning_text.done", "content_part.done", "output_item.done", "output_item.added", "content_part.added"),
    *("output_text.delta", "output_text.done", "content_part.done", "output_item.done", "output_item.added"),
    *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
]


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("small",))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_response_is_the_chat_with_the_same_messages(client):
    asked = {"model": "small", "temperature": 0}
    found = client.responses.create(**asked, instructions="Be brief.", input="What?", max_output_tokens=6, store=False)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    wanted = client.chat.completions.create(**asked, messages=messages, max_tokens=6)
    assert found.output_text == wanted.choices[0].message.content
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.usage.input_tokens, found.usage.output_tokens) == (wanted.usage.prompt_tokens, 6)
    assert (found.instructions, found.max_output_tokens, found.store) == ("Be brief.", 6, False)


def test_a_stream_has_the_events_in_order_and_ends_with_the_whole(client):
    asked = {
        "model": "small",
        "input": "Go?",
        "tools": TOOLS,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }
    asked |= {"extra_headers": {"X-Request-Id": "same"}, "extra_body": {"structured_outputs": {"choice": [SAID]}}}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "hm" and whole.output_text == "Sure."
    assert json.loads(whole.output[2].arguments) == {"to": "Rom"} and whole.status == "completed"
    assert "".join(entry.token for entry in whole.output[1].content[0].logprobs).strip().endswith("Sure.")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for place, kind in enumerate(kinds) if kind != kinds[place - 1]] == EVENTS
    assert events[-1].response.output == whole.output
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == "Sure."


def test_a_call_is_answered_with_the_items_that_came(client):
    asked = {"model": "small", "tools": TOOLS, "max_output_tokens": 60}
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


ITEM = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}"}
WRONG = [
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "r"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": 5}, "text"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"include": ["reasoning.encrypted_content"]}, "include"),
    ({"include": "all"}, "include"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"top_logprobs": ""}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"truncation": "auto"}, "truncation"),
    ({"instructions": []}, "instructions"),
    ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"stream": 1}, "stream"),
    ({"n": 2}, "n"),
    ({"inputs": "x"}, "inputs"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": {}}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [ITEM | {"call_id": 5}]}, "input[0].call_id"),
    ({"input": [ITEM | {"arguments": "{"}]}, "input[0].arguments"),
    ({"input": [ITEM | {"arguments": "[" * 100_000}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[0].encrypted_content"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_an_error_names_the_field(fields, param):
    with pytest.raises(FieldError) as found:
        asked_response({"model": "small", "input": "x", **fields}, BodyLimits())
    assert found.value.param == param, found.value


def test_who_leaves_a_stream_ends_what_runs_for_them(server):
    asked = {"input": "x", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with server.connect() as connection:
        connection.sendall(request("/v1/responses", json.dumps(asked).encode()))
        assert connection.recv(100)
    server.wait_until_idle(30.0)


def test_errors_come_with_their_status(server):
    status, _, found = server.ask("/v1/responses", {"input": "x", "previous_response_id": "r"})
    assert status == 400 and found["error"]["param"] == "previous_response_id"
    assert server.ask("/v1/responses", {"input": "x " * 400})[2]["error"]["code"] == "context_length_exceeded"
