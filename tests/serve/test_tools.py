"""Tools, structures and reasoning over HTTP, as OpenAI's own client reads them; streams add up to the whole."""

from __future__ import annotations

import json
import math
import sys
from typing import Literal

import openai
import pydantic
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.asked.codec import params_of_json
from ferrum_jax.asked.structured_outputs import StructuredOutputsParams
from ferrum_jax.asked.tools import tools_asked
from ferrum_jax.outputs import NO_STRUCTURE
from ferrum_jax.serve.http.http_errors import http_error
from ferrum_jax.serve.http.service import wire_params
from ferrum_jax.serve.http.settings import ServerSettings
from ferrum_jax.serve.link.engine_client import RequestRefused
from ferrum_jax.structured.vocabulary import require_llguidance
from tests.serve.running import running

CHAT = [{"role": "user", "content": "Go?"}]
PLACES = {"type": "object", "properties": {"to": {"enum": ["Köln", "Rom"]}}, "required": ["to"]}
PLACES["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": "go", "parameters": PLACES}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>{"name":"go","arguments":{"to":"Rom"}}</tool_call>'
SAID = f'<think>\nhm\n</think>\n\nSure.\n{CALL}\n<tool_call>{{"name":"stop","arguments":{{}}}}</tool_call>'


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    word: Literal["yes", "no"]


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("small",))) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "small", "messages": CHAT, "max_tokens": 220, **fields})


def says(text: str) -> dict:
    """Fields under which the model says just this."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def added_up(chunks):
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    ended = None
    for chunk in chunks:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, ["", "", ""])
            for place, piece in enumerate((call.id, call.function.name, call.function.arguments)):
                known[place] += piece or ""
        ended = choice.finish_reason or ended
    return content, reasoning, [tuple(call) for _, call in sorted(calls.items())], ended


def parts_of(choice):
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.message.content or "", choice.message.reasoning, calls, choice.finish_reason


def test_what_is_thought_said_and_called_comes_apart_whole_and_streamed(client):
    asked = {"tools": TOOLS, "extra_headers": {"X-Request-Id": "same"}, "logprobs": True, **says(SAID)}
    whole = chat(client, **asked).choices[0]
    content, reasoning, calls, ended = parts_of(whole)
    assert (content, reasoning, ended) == ("Sure.", "hm", "tool_calls")
    found = [(name, json.loads(arguments)) for _, name, arguments in calls]
    assert found == [("go", {"to": "Rom"}), ("stop", {})]
    assert len({call_id for call_id, _, _ in calls}) == 2
    chunks = list(chat(client, **asked, stream=True))
    assert added_up(chunks) == parts_of(whole)
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entries == whole.logprobs.content


def test_without_tools_a_call_stays_text(client):
    assert chat(client, **says(CALL)).choices[0].message.content == CALL
    found = chat(client, tools=TOOLS, tool_choice="none", **says(CALL)).choices[0]
    assert found.message.content == CALL and found.finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_demanded_comes(client, streams):
    named = {"type": "function", "function": {"name": "go"}}
    for choice in ("required", named):
        asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
        found = chat(client, **asked, stream=streams)
        _, _, calls, ended = added_up(found) if streams else parts_of(found.choices[0])
        ((_, name, arguments),) = calls
        assert ended == "tool_calls" and (name == "go" or choice == "required")
        assert json.loads(arguments) in ({"to": "Köln"}, {"to": "Rom"}) if name == "go" else json.loads(arguments) == {}


def test_what_is_thought_is_left_out_where_that_is_asked_for(client):
    asked = says(SAID)
    asked["extra_body"]["include_reasoning"] = False
    content, reasoning, _, _ = added_up(chat(client, tools=TOOLS, **asked, stream=True))
    said = chat(client, tools=TOOLS, **asked).choices[0].message
    assert (content, reasoning) == (said.content, "") == ("Sure.", "") and not hasattr(said, "reasoning")


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
    found = chat(client, tools=TOOLS, **says(f"<think>a</think>{CALL}")).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in found.tool_calls]
    assert chat(client, messages=[*CHAT, found, *results], tools=TOOLS, max_tokens=2).choices[0].message.content


def test_a_pydantic_model_is_parsed(client):
    asked = {"model": "small", "messages": CHAT, "max_tokens": 200}
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


def test_the_effort_reaches_the_template(client, server):
    count = [chat(client, max_tokens=1, **more).usage.prompt_tokens for more in ({}, {"reasoning_effort": "low"})]
    assert count[1] > count[0]
    both = {"messages": CHAT, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert server.ask("/v1/chat/completions", both)[2]["error"]["param"] == "reasoning_effort"


WRONG = [
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"messages": [{"role": "assistant", "content": "", "reasoning": 5}]}, "messages[0].reasoning"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_an_error_names_the_place(server, fields, param):
    status, _, found = server.ask("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2, **fields})
    assert (status, found["error"]["param"]) == (400, param), found
