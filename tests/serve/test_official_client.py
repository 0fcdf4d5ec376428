"""`ferrum-jax serve` with the demo model, as users meet it: OpenAI's own client, 64 requests at once, and curl."""

import asyncio
import json
import shutil
import subprocess

import numpy as np
import openai
import pytest

from ferrum_jax import LLM, SamplingParams
from tests.openai.asked import ASKS, TOOLS
from tests.serve.running import DEMO, DEMO_SIZES, serving_demo
from tests.serve.test_client import Answer
from tests.support import COMPILED

PROMPT = "def main():"
PATIENCE_S = 300.0  # also to connect, where the client alone would wait 5 s
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wanted():
    """What LLM gives for the prompt, greedily."""
    llm = LLM(DEMO, **DEMO_SIZES, compilation_cache_dir=str(COMPILED))
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=12, temperature=0.0))
    (vector,) = llm.embed([PROMPT])
    return output, vector.embedding


@pytest.fixture(scope="module")
def url(tmp_path_factory, wanted):
    with serving_demo(tmp_path_factory.mktemp("texts")) as found:
        yield found


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as found:
        yield found


def test_completions_and_vectors_are_those_of_llm(client, wanted):
    output, vector = wanted
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == output.text
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
    assert streamed == output.text
    found = client.embeddings.create(model="demo", input=PROMPT).data[0].embedding
    np.testing.assert_allclose(found, vector, rtol=1e-4, atol=1e-4)


def test_chats_call_tools_and_are_parsed_over_two_processes(client):
    asked = {"model": "demo", "messages": ASKS, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "go"}}
    stream = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=named, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    arguments = [call.function.arguments or "" for choice in choices for call in choice.delta.tool_calls or ()]
    assert choices[-1].finish_reason == "tool_calls" and json.loads("".join(arguments))["to"] in ("Köln", "Rom")
    found = client.chat.completions.parse(**asked, response_format=Answer)
    assert found.choices[0].message.parsed.word in ("yes", "no")


def test_responses_stream_and_are_parsed(client):
    found = client.responses.parse(model="demo", input="Well?", text_format=Answer, max_output_tokens=300)
    assert found.output_parsed.word in ("yes", "no")
    asked = {"model": "demo", "input": "Well?", "text_format": Answer, "max_output_tokens": 300}
    with client.responses.stream(**asked) as stream:  # of one that is cut off the client gives no final response
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
        assert final.output_text == deltas and final.output_parsed.word in ("yes", "no")


def test_64_at_once_are_answered_as_one_alone(url, wanted):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
            asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            answers = await asyncio.gather(*(client.completions.create(**asked) for _ in range(64)))
            return [answer.choices[0].text for answer in answers]

    assert set(asyncio.run(ask())) == {wanted[0].text}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_json_and_events(url, wanted):
    def curl(path: str, body: object) -> str:
        words = ["curl", "-sS", "-N", f"{url}{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout

    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    assert json.loads(curl("/completions", asked))["choices"][0]["text"] == wanted[0].text
    assert curl("/completions", {**asked, "stream": True}).endswith("data: [DONE]\n\n")
    events = curl("/responses", {"input": "x", "max_output_tokens": 2, "stream": True}).split("\n\n")
    assert events[0].startswith("event: response.created\ndata: {") and "response.incomplete" in events[-2]
    assert json.loads(curl("/completions", {"prompt": 5}))["error"]["param"] == "prompt"
