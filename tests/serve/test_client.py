"""Tools, structures and items as OpenAI's own client reads and sends them. What bodies are answered: tests/openai."""

from __future__ import annotations

import json
import math
import sys
from typing import Literal

import openai
import pydantic
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.core.outputs import NO_STRUCTURE
from ferrum_jax.core.params_codec import params_of_json
from ferrum_jax.inputs.params.structured_outputs import StructuredOutputsParams
from ferrum_jax.inputs.params.tools import tools_asked
from ferrum_jax.openai.response_body import input_messages
from ferrum_jax.serve.http.http_errors import http_error
from ferrum_jax.serve.http.service import wire_params
from ferrum_jax.serve.link.engine_client import RequestRefused
from ferrum_jax.text.structured.vocabulary import require_llguidance
from tests.openai.asked import ASKS, CALL, PLACES, TOOLS
from tests.rows import rows_beside
from tests.serve.running import request


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    word: Literal["yes", "no"]


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "small", "messages": ASKS, "max_tokens": 220, **fields})


def test_a_structure_where_its_library_is_missing_is_501_and_tells_no_path():
    refusal = "structured output needs llguidance, which is not installed; install it: pip install -e /home/me"
    answer = http_error(RequestRefused(refusal))
    assert answer is not None and (answer.status, answer.code) == (501, "not_installed")
    assert "/home/me" not in answer.message and "the extra structured" in answer.message


def test_the_library_that_is_missing_is_named_as_servers_know_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=f"^{NO_STRUCTURE}; install it: pip install"):
        require_llguidance()


def test_a_message_goes_back_as_it_came(client):
    said = {"structured_outputs": {"choice": [f"<think>a</think>{CALL}"]}}
    found = chat(client, tools=TOOLS, extra_body=said).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in found.tool_calls]
    assert chat(client, messages=[*ASKS, found, *results], tools=TOOLS, max_tokens=2).choices[0].message.content


def test_a_pydantic_model_is_parsed(client):
    asked = {"model": "small", "messages": ASKS, "max_tokens": 200}
    found = client.chat.completions.parse(**asked, response_format=Answer)
    assert found.choices[0].message.parsed.word in ("yes", "no")
    tool = openai.pydantic_function_tool(Answer)
    called = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.parsed_arguments.word in ("yes", "no")
    with client.chat.completions.stream(**asked, response_format=Answer, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.parsed.word in ("yes", "no")


def test_parameters_are_the_same_after_the_link():
    structure = StructuredOutputsParams(tools=tools_asked(TOOLS, "required", False), disable_any_whitespace=True)
    params = SamplingParams(structured_outputs=structure, logit_bias={5: -math.inf, 7: 1.5}, stop=["a"], min_p=0.1)
    sent = json.loads(json.dumps(wire_params(params)))
    assert params_of_json(sent) == params


GO = {"type": "function", "name": "go", "parameters": PLACES, "strict": True}


def test_what_is_thought_said_and_called_are_items_whole_and_streamed(client):
    asked = {"model": "small", "input": "Go?", "tools": [GO], "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "extra_headers": {"X-Request-Id": "same"}}
    asked["extra_body"] = {"structured_outputs": {"choice": [f"<think>\nhm\n</think>\n\nSure.\n{CALL}"]}}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert "".join(entry.token for entry in whole.output[1].content[0].logprobs).strip().endswith("Sure.")
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    events = list(client.responses.create(**asked, stream=True))
    assert events[-1].response.output == whole.output
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Sure."


def test_a_call_is_answered_with_the_items_that_came(client):
    asked = {"model": "small", "max_output_tokens": 60, "tools": [GO]}
    named = {"type": "function", "name": "go"}
    first = client.responses.create(**asked, input="Go?", tool_choice=named)
    (call,) = first.output
    assert call.name == "go" and json.loads(call.arguments)["to"] in ("Köln", "Rom")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "there"}
    asked["max_output_tokens"] = 2
    assert client.responses.create(**asked, input=[{"role": "user", "content": "Go?"}, call, result]).output_text


def test_a_pydantic_model_is_parsed_from_a_response(client):
    found = client.responses.parse(model="small", input="Well?", text_format=Answer, max_output_tokens=200)
    assert found.output_parsed.word in ("yes", "no")


def test_items_of_an_assistant_are_one_message():
    found = input_messages(rows_beside(__file__)["items of an assistant"])
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "assistant"]
    a, b, c, ok = ({"type": "text", "text": text} for text in ("a", "b", "c", "ok"))
    assert found[0]["content"] == [a, b] and found[2] == {"role": "tool", "tool_call_id": "c", "content": [ok]}
    assert (found[1]["reasoning"], found[1]["content"], len(found[1]["tool_calls"])) == ("hm", [c], 2)


def test_who_leaves_a_stream_of_a_response_ends_what_runs_for_them(server):
    asked = {"input": "x", "max_output_tokens": 200, "ignore_eos": True, "stream": True}
    with server.connect() as connection:
        connection.sendall(request("/v1/responses", json.dumps(asked).encode()))
        assert connection.recv(100)
    server.wait_until_idle(30.0)
