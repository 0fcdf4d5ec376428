"""What a server answers: what OpenAI's own client reads of it equals what LLM gives, and errors name their field."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import re

import numpy as np
import openai
import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import request, running, serving_llm

PROMPT = "def main(arguments):"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
CHAT = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def server():
    with running(ServerSettings(names=("small", "other"), max_n=8, max_prompts=64)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def offline(server):
    """Calls of LLM on the engine of the server, between its steps."""
    llm = serving_llm()

    def call(name, *arguments):
        return server.llm.thread.call(lambda: getattr(llm, name)(*arguments)).result()

    return call


def complete(client, prompt=PROMPT, **fields):
    return client.completions.create(model="small", prompt=prompt, **{"max_tokens": 12, "temperature": 0, **fields})


def test_a_completion_is_what_llm_gives(client, offline):
    (wanted,) = offline("generate", PROMPT, GREEDY)
    found = complete(client)
    choice = found.choices[0]
    assert (choice.text, choice.finish_reason) == (wanted.text, wanted.finish_reason)
    assert found.usage.completion_tokens == len(wanted.token_ids)
    assert found.usage.prompt_tokens == len(wanted.prompt_token_ids)


def test_a_chat_is_what_llm_gives(client, offline):
    (wanted,) = offline("chat", CHAT, GREEDY)
    found = client.chat.completions.create(model="other", messages=CHAT, max_completion_tokens=12, temperature=0)
    assert found.choices[0].message.content == wanted.text
    assert found.model == "small"


@pytest.mark.parametrize("fields", [{}, {"stop": ["e", "\n\n"]}, {"n": 3, "temperature": 0.9, "seed": 5}])
def test_a_stream_adds_up_to_the_whole(client, fields):
    whole = complete(client, **fields, logprobs=2)
    texts, entries, ended = {}, {}, {}
    for chunk in complete(client, **fields, logprobs=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                entries.setdefault(choice.index, []).extend(zip(*vars(choice.logprobs).values(), strict=True))
            ended[choice.index] = choice.finish_reason
    assert chunk.usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert entries[choice.index] == list(zip(*vars(choice.logprobs).values(), strict=True))
        assert ended[choice.index] == choice.finish_reason


def test_a_stop_string_ends_a_text_as_offline(client, offline):
    (whole,) = offline("generate", PROMPT, GREEDY)
    stop = whole.text[3:5]
    (wanted,) = offline("generate", PROMPT, SamplingParams(max_tokens=12, temperature=0.0, stop=stop))
    found = complete(client, stop=stop)
    assert found.choices[0].text == wanted.text and found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens == len(wanted.token_ids)


def test_a_chat_streams_with_a_role_and_logprobs(client):
    asked = {"model": "small", "messages": CHAT, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    entries = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert entries == whole.choices[0].logprobs.content and len(entries[0].top_logprobs) == 2


def test_several_prompts_of_texts_and_ids_are_answered_in_their_order(client, offline):
    prompts = [[7, 8, 9], [20, 30, 40, 50]]
    wanted = offline("generate", prompts, GREEDY)
    found = complete(client, prompts, extra_body={"return_token_ids": True})
    assert [choice.token_ids for choice in found.choices] == [list(output.token_ids) for output in wanted]
    streamed = {0: "", 1: ""}
    for chunk in complete(client, prompts, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == [output.text for output in wanted]


def test_an_echo_has_the_prompt_and_its_log_probabilities(client):
    found = complete(client, echo=True, logprobs=1, max_tokens=2)
    assert found.choices[0].text.startswith(PROMPT)
    assert "".join(found.choices[0].logprobs.tokens).startswith(PROMPT)
    alone = complete(client, echo=True, max_tokens=0)
    assert alone.choices[0].text == PROMPT and alone.usage.completion_tokens == 0
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, echo=True, max_tokens=2, stream=True))
    assert streamed == found.choices[0].text


def test_64_at_once_are_answered_as_one_after_the_other(client, offline):
    prompts = [[7 + i % 200, 9, 11] for i in range(64)]
    wanted = offline("generate", prompts, SamplingParams(max_tokens=3, temperature=0.0))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt, max_tokens=3), prompts))
    assert [answer.choices[0].text for answer in found] == [output.text for output in wanted]


def test_vectors_are_those_of_embed(client, offline):
    wanted = offline("embed", ["one text", "another"])
    for form in ("float", "base64"):
        found = client.embeddings.create(model="small", input=["one text", "another"], encoding_format=form)
        for one, other in zip(found.data, wanted, strict=True):
            values = one.embedding if form == "float" else np.frombuffer(base64.b64decode(one.embedding), "<f4")
            assert np.asarray(values) == pytest.approx(other.embedding, abs=1e-4)


def test_a_model_that_generates_says_that_its_vectors_mean_little(server):
    status, headers, _ = server.ask("/v1/embeddings", {"model": "small", "input": "one text"})
    assert status == 200 and "the model was made to generate" in headers["warning"]
    assert server.ask("/v1/models/small")[2]["made_for"] == ["generate"]


def test_models_tokens_and_health(client, server):
    assert [model.id for model in client.models.list()] == ["small", "other"]
    assert client.models.retrieve("small").id == "small"
    _, _, found = server.ask("/tokenize", {"prompt": PROMPT})
    assert found["count"] == len(found["tokens"])
    assert server.ask("/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": PROMPT}
    assert server.ask("/tokenize", {"messages": CHAT})[2]["count"] > found["count"] - 100
    assert [server.ask(path)[0] for path in ("/health", "/ready", "/version", "/metrics")] == [200] * 4


def test_metrics_have_the_names_that_others_read(client, server):
    complete(client)
    text = server.ask("/metrics")[2].decode()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"):
        assert f'vllm:{name}{{model_name="small"}}' in text
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert f'vllm:{name}_seconds_count{{model_name="small"}}' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="small"}' in text


def test_a_request_id_comes_back_and_gives_the_same_draws(server):
    body = {"prompt": PROMPT, "max_tokens": 8}
    answers = [server.ask("/v1/completions", body, X_Request_Id="mine") for _ in range(2)]
    assert answers[0][1]["x-request-id"] == "mine" and answers[0][2]["id"] == "cmpl-mine"
    assert answers[0][2]["choices"] == answers[1][2]["choices"]


WRONG = [
    ({"max_tokns": 3}, "max_tokns", "did you mean max_tokens"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": -1}, "temperature", "0 (greedy) or more"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10_000}, "prompt", "maximum context length is 256 tokens"),
    ({"n": 9}, "n", "at most 8"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logprobs": 99}, "logprobs", "between 0 and 20"),
    ({"stream_options": {}}, "stream_options", "without stream"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "include_usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
        "response_format",
        "objekt",
    ),
    ({"prompt": "\ud800"}, "prompt", "surrogates"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"tools": [{"type": "function"}]}, "tools", "tools are for messages"),
    ({"response_format": {"type": "poem"}}, "response_format.type", "poem"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "5"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": "("}, "n": 2}, "structured_outputs.regex", "regex"),
    ({"store": True}, "store", "nothing is stored"),
    ({"prompt": None}, "prompt", "must have it"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": [999_999]}, "prompt", "token id 999999"),
    ({"prompt": [["a"]]}, "prompt[0]", "token ids are whole numbers"),
    ({"prompt": ["x"] * 65}, "prompt", "at most 64"),
    ({"priority": 1.5}, "priority", "whole number"),
    ({"timeout": 0}, "timeout", "more than 0"),
    ({"cache_salt": 5}, "cache_salt", "string"),
]


@pytest.mark.parametrize(("fields", "param", "words"), WRONG, ids=lambda value: str(value)[:30])
def test_an_error_names_its_field(server, fields, param, words):
    status, _, found = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 2, **fields})
    assert status == 400, found
    assert found["error"]["param"] == param and words in found["error"]["message"]
    assert found["error"]["type"] == "invalid_request_error"


def test_a_structure_is_kept_to_by_either_name(server):
    asked = {"messages": CHAT, "max_tokens": 40, "structured_outputs": {"choice": ["yes", "no"]}}
    status, _, found = server.ask("/v1/chat/completions", asked)
    assert status == 200 and found["choices"][0]["message"]["content"] in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    _, _, found = server.ask("/v1/chat/completions", {"messages": CHAT, "max_tokens": 220, "response_format": form})
    assert json.loads(found["choices"][0]["message"]["content"])["a"] in (1, 2)


def test_what_has_no_effect_is_taken(server):
    body = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "s", "store": False}
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, **body})[0] == 200


def test_other_models_and_paths_are_not_found(server):
    status, _, found = server.ask("/v1/completions", {"model": "gpt", "prompt": "x"})
    assert (status, found["error"]["code"], found["error"]["param"]) == (404, "model_not_found", "model")
    assert server.ask("/v1/nothing", {})[0] == 404
    assert server.ask("/v1/completions")[0] == 405
    assert server.ask("/v1/completions", b"{}", Content_Type="text/plain")[0] == 415
    assert server.ask("/v1/completions", b"{}", Content_Encoding="gzip")[0] == 415
    status, _, found = server.ask("/detokenize", {"tokens": [1, 999_999]})
    assert (status, found["error"]["param"]) == (400, "tokens")


def test_unknown_fields_become_a_warning_where_they_are_to_be_ignored():
    with running(
        ServerSettings(names=("small",), ignore_unknown_fields=True, cors_origins=("https://a.example",))
    ) as server:
        status, headers, _ = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, "top_a": 1})
        assert status == 200 and headers["warning"] == '199 - "top_a was ignored"'
        fields = {"b\r\nX-Evil: 1": 1, 'n\u00e4h\u4e00"': 2} | {f"x{i}": i for i in range(30)}
        status, headers, _ = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, **fields})
        assert status == 200 and "x-evil" not in headers and "12 more" in headers["warning"]
        headers = server.ask("/v1/models", Origin="https://a.example")[1]
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in server.ask("/v1/models", Origin="https://b.example")[1]


@pytest.mark.filterwarnings("ignore:structured_outputs")
def test_words_of_a_schema_that_enforce_nothing_become_a_warning(server):
    schema = {"type": "object", "properties": {"a": {"type": "null", "javaType": "A"}}, "additionalProperties": False}
    asked = {
        "max_tokens": 8,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    status, headers, _ = server.ask("/v1/chat/completions", {"messages": CHAT, **asked})
    words = "the JSON schema has an unknown word, which enforces nothing: #/properties/a/javaType"
    assert status == 200 and headers["warning"] == f'199 - "{words}"'
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    status, headers, _ = server.ask(
        "/v1/responses", {"input": "x", "max_output_tokens": 8, "text": text, "store": False}
    )
    assert status == 200 and headers["warning"] == f'199 - "{words}"'
    schema["oneOf"] = [{"pattern": "a"}, {"pattern": "b"}]
    status, _, found = server.ask("/v1/chat/completions", {"messages": CHAT, **asked})
    assert (status, found["error"]["param"]) == (400, "response_format") and "#/oneOf" in found["error"]["message"]


def test_every_event_of_a_stream_is_json(server):
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    answer = server.raw(request("/v1/completions", json.dumps(body).encode()))
    events = [line[6:] for line in answer.split(b"\r\n") for line in line.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    found = [json.loads(event) for event in events[:-1]]
    counted = [event["usage"]["completion_tokens"] for event in found]
    assert counted == sorted(counted) and counted[-2:] == [3, 3]
    assert [len(event["choices"]) for event in found] == [1] * (len(found) - 1) + [0]
    assert sum(len(choice["token_ids"]) for event in found for choice in event["choices"]) == 3


def test_the_page_asks_nobody_else_and_shows_no_text(server, client):
    complete(client, "a very secret prompt")
    status, headers, page = server.ask("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert b"http://" not in page and b"https://" not in page
    with server.connect() as connection:
        connection.sendall(request("/page/events", b"", "GET"))
        found = b""
        while b'"recent_steps"' not in found:
            part = connection.recv(1 << 16)
            assert part, found
            found += part
    assert b"secret" not in found and b'"state":"ready"' in found


def test_what_is_said_of_a_prompt_stands_in_each_choice_of_a_completion(server):
    asked = {"max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    for prompt in ([7, 8, 9], [[7, 8, 9], [20, 30]]):
        status, _, found = server.ask("/v1/completions", {"prompt": prompt, **asked})
        assert status == 200 and not {"prompt_logprobs", "prompt_token_ids"} & found.keys()
        wanted = prompt if isinstance(prompt[0], list) else [prompt]
        assert [choice["prompt_token_ids"] for choice in found["choices"]] == wanted
        assert [len(choice["prompt_logprobs"]) for choice in found["choices"]] == [len(each) for each in wanted]


@pytest.mark.parametrize("top", [0, 1, 3])
def test_a_token_of_a_chat_has_as_many_alternatives_as_were_asked_for(server, top):
    asked = {"messages": CHAT, "max_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": top}
    _, _, found = server.ask("/v1/chat/completions", asked)
    entries = found["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4 and [len(entry["top_logprobs"]) for entry in entries] == [top] * 4


def test_tokens_are_named_by_their_ids_where_that_is_asked_for(server):
    more = {"max_tokens": 3, "logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    _, _, found = server.ask("/v1/chat/completions", {"messages": CHAT, **more})
    choice = found["choices"][0]
    names = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == names
    _, _, found = server.ask("/v1/completions", {"prompt": PROMPT, **more, "logprobs": 1})
    choice = found["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_every_chunk_has_usage_where_that_is_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"messages": CHAT, "max_tokens": 3, "stream": True, "stream_options": options}
    answer = server.raw(request("/v1/chat/completions", json.dumps(asked).encode())).decode()
    chunks = [json.loads(line[6:]) for line in re.findall(r"data: {.*", answer)]
    assert len(chunks) >= 4 and all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


def test_a_body_may_name_its_request(server):
    named = {"prompt": "x", "max_tokens": 1, "request_id": "mine-1", "prompt_cache_key": "k"}
    for _ in range(2):  # one after the other
        status, headers, found = server.ask("/v1/completions", named, X_Request_Id="other")
        assert (status, headers["x-request-id"], found["id"]) == (200, "mine-1", "cmpl-mine-1")
    server.service.named.add("mine-1")
    status, _, found = server.ask("/v1/completions", named)
    server.service.named.discard("mine-1")
    assert (status, found["error"]["code"], found["error"]["param"]) == (400, "request_id_in_use", "request_id")
    assert server.ask("/v1/completions", {**named, "request_id": "a b"})[0] == 400
