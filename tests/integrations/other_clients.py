"""LangChain's and LiteLLM's clients of OpenAI's HTTP at a running server. Prints what they got as a line of JSON.

python tests/integrations/other_clients.py URL KEY

It runs in an environment of its own, with langchain-openai and litellm, and imports nothing of this repository.
"""

import asyncio
import json
import os
import sys
from typing import Any, Literal

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}  # no network is needed

import litellm
import pydantic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

MODEL, PROMPT, QUESTION = "demo", "def main():", "Go?"
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
CALL = 'Sure. <tool_call>{"name":"go","arguments":{"to":"Rom"}}</tool_call>'
CALLS = {"structured_outputs": {"choice": [CALL]}}


class Answer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    word: Literal["yes", "no"]


@tool
def go(to: Literal["Köln", "Rom"]) -> str:
    """Goes to a place."""
    return to


def langchain(url: str, key: str) -> dict[str, Any]:
    """What LangChain's classes give."""
    where: dict[str, Any] = {"model": MODEL, "base_url": url, "api_key": key, "max_retries": 0}
    chat = ChatOpenAI(**where, **GREEDY, stream_usage=True)
    whole = chat.invoke(QUESTION)
    pieces = list(chat.stream(QUESTION))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    longer = ChatOpenAI(**where, max_tokens=220, temperature=0)
    with_tools = ChatOpenAI(**where, max_tokens=220, temperature=0, extra_body=CALLS).bind_tools([go])
    called = with_tools.invoke(QUESTION)
    streamed_call = None
    for piece in with_tools.stream(QUESTION):
        streamed_call = piece if streamed_call is None else streamed_call + piece
    answered = chat.invoke(
        [HumanMessage(QUESTION), called, ToolMessage("Rom", tool_call_id=called.tool_calls[0]["id"])]
    )
    asked = [longer.with_structured_output(Answer, method=method) for method in ("json_schema", "function_calling")]
    responses = ChatOpenAI(**where, temperature=0, max_tokens=16, use_responses_api=True)
    text = OpenAI(**where, **GREEDY)
    return {
        "chat": whole.content,
        "usage": whole.usage_metadata,
        "streamed": joined.content,
        "streamed_usage": joined.usage_metadata,
        "batch": [message.content for message in chat.batch([QUESTION] * 8)],
        "async": asyncio.run(_streamed(chat)),
        "calls": [called.content, called.tool_calls[0]["name"], called.tool_calls[0]["args"]],
        "streamed_calls": [streamed_call.content, *(streamed_call.tool_calls[0][name] for name in ("name", "args"))],
        "goes_on": isinstance(answered, AIMessage),
        "structured": [model.invoke(QUESTION).word for model in asked],
        "responses": responses.invoke(QUESTION).text,
        "responses_streamed": "".join(piece.text for piece in responses.stream(QUESTION)),
        "completion": text.invoke(PROMPT),
        "completion_streamed": "".join(text.stream(PROMPT)),
        "vectors": OpenAIEmbeddings(**where, check_embedding_ctx_length=False).embed_documents([PROMPT, "x"]),
    }


async def _streamed(chat: ChatOpenAI) -> str:
    return "".join([piece.content async for piece in chat.astream(QUESTION)])


def lite(url: str, key: str) -> dict[str, Any]:
    """What LiteLLM's functions give, through its provider for OpenAI and that for vLLM."""
    where: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": url, "api_key": key}
    asked = {**where, "messages": [{"role": "user", "content": QUESTION}]}
    whole = litellm.completion(**asked, **GREEDY)
    pieces = list(litellm.completion(**asked, **GREEDY, stream=True, stream_options={"include_usage": True}))
    tools = [{"type": "function", "function": {"name": "go", "parameters": go.args_schema.model_json_schema()}}]
    calls = {**asked, "max_tokens": 220, "tools": tools, "extra_body": CALLS}
    called = litellm.completion(**calls).choices[0].message
    joined = litellm.stream_chunk_builder(list(litellm.completion(**calls, stream=True))).choices[0].message
    parsed = litellm.completion(**asked, max_tokens=220, response_format=Answer).choices[0].message.content
    vllm = {**where, "model": f"hosted_vllm/{MODEL}"}
    return {
        "chat": whole.choices[0].message.content,
        "usage": dict(whole.usage)["total_tokens"],
        "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        "async": asyncio.run(litellm.acompletion(**asked, **GREEDY)).choices[0].message.content,
        "vllm": litellm.completion(**{**asked, **vllm}, **GREEDY).choices[0].message.content,
        "calls": [
            called.content,
            called.tool_calls[0].function.name,
            json.loads(called.tool_calls[0].function.arguments),
        ],
        "streamed_calls": [
            joined.content,
            joined.tool_calls[0].function.name,
            json.loads(joined.tool_calls[0].function.arguments),
        ],
        "structured": Answer.model_validate_json(parsed).word,
        "responses": litellm.responses(**where, input=QUESTION, max_output_tokens=16, temperature=0).output_text,
        "completion": litellm.text_completion(
            **{**where, "model": f"text-completion-openai/{MODEL}"}, prompt=PROMPT, **GREEDY
        )
        .choices[0]
        .text,
        "vectors": [each["embedding"] for each in litellm.embedding(**where, input=[PROMPT, "x"]).data],
        "error": _error(asked),
    }


def _called(message: Any) -> list[Any]:
    function = message.tool_calls[0].function
    return [message.content, function.name, json.loads(function.arguments)]


def _error(asked: dict[str, Any]) -> str:
    """Which of LiteLLM's errors a prompt that is too long becomes."""
    try:
        litellm.completion(**asked, max_tokens=100_000, num_retries=0)
    except Exception as error:
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    found = {"langchain": langchain(*sys.argv[1:]), "litellm": lite(*sys.argv[1:])}
    print(json.dumps(found))
