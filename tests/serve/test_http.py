"""What a server answers beside bodies, which tests/openai has: streams, models, metrics, headers, names and pages."""

import concurrent.futures
import json

import pytest

from ferrum_jax import SamplingParams
from ferrum_jax.serve.http.settings import ServerSettings
from tests.serve.running import request, running, serving_llm
from tests.support import INVARIANT

PROMPT = "def main(arguments):"
CHAT = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def server():
    """A server over an invariant LLM: answers are compared in all digits, whatever ran beside them."""
    settings = ServerSettings(names=("small", "other"), max_n=8, max_prompts=64)
    with running(settings, inner=serving_llm(INVARIANT)) as found:
        yield found


@pytest.fixture(scope="module")
def offline(server):
    """Calls of LLM on the engine of the server, between its steps."""
    llm = serving_llm(INVARIANT)

    def call(name, *arguments):
        return server.llm.thread.call(lambda: getattr(llm, name)(*arguments)).result()

    return call


def complete(client, prompt=PROMPT, **fields):
    return client.completions.create(model="small", prompt=prompt, **{"max_tokens": 12, "temperature": 0, **fields})


@pytest.mark.parametrize("fields", [{}, {"stop": ["k/", "\n\n"]}, {"n": 3, "temperature": 0.9, "seed": 5}])
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
        assert ended[choice.index] == choice.finish_reason == ("stop" if "stop" in fields else "length")


def test_64_at_once_are_answered_as_one_after_the_other(client, offline):
    prompts = [[7 + i % 200, 9, 11] for i in range(64)]
    wanted = offline("generate", prompts, SamplingParams(max_tokens=3, temperature=0.0))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: complete(client, prompt, max_tokens=3), prompts))
    assert [answer.choices[0].text for answer in found] == [output.text for output in wanted]


def test_models_tokens_and_health(client, server):
    assert [model.id for model in client.models.list()] == ["small", "other"]
    assert client.models.retrieve("small").id == "small"
    assert server.ask("/v1/models/small")[2]["made_for"] == ["generate"]
    assert server.ask("/v1/completions", {"model": "other", "prompt": "x", "max_tokens": 1})[2]["model"] == "small"
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


def test_models_of_a_server_that_still_loads_are_asked_for_again(server, monkeypatch):
    monkeypatch.setattr(server.service, "is_open", False)
    found = [server.ask(path)[::2] for path in ("/v1/models", "/v1/models/small")]
    assert [(status, body["error"]["code"]) for status, body in found] == [(503, "starting")] * 2


def test_a_request_id_comes_back_and_gives_the_same_draws(server):
    body = {"prompt": PROMPT, "max_tokens": 8}
    answers = [server.ask("/v1/completions", body, X_Request_Id="mine") for _ in range(2)]
    assert answers[0][1]["x-request-id"] == "mine" and answers[0][2]["id"] == "cmpl-mine"
    assert answers[0][2]["choices"] == answers[1][2]["choices"]


def test_other_models_and_paths_are_not_found(server):
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
        fields = {"b\r\nX-Evil: 1": 1, 'n\u00e4h\u4e00"': 2} | {f"x{i}": i for i in range(30)}
        status, headers, _ = server.ask("/v1/completions", {"prompt": "x", "max_tokens": 1, **fields})
        assert status == 200 and "x-evil" not in headers and "12 more" in headers["warning"]
        headers = server.ask("/v1/models", Origin="https://a.example")[1]
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in server.ask("/v1/models", Origin="https://b.example")[1]


@pytest.mark.parametrize(
    ("path", "asked"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})]
)
def test_every_event_of_a_stream_is_json_and_has_usage_where_that_is_asked_for(server, path, asked):
    body = {**asked, "max_tokens": 3, "stream": True, "return_token_ids": True, "ignore_eos": True}
    body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    answer = server.raw(request(path, json.dumps(body).encode()))
    events = [line[6:] for line in answer.split(b"\r\n") for line in line.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    found = [json.loads(event) for event in events[:-1]]
    counted = [event["usage"]["completion_tokens"] for event in found]
    assert counted == sorted(counted) and counted[-2:] == [3, 3]
    assert all(event["usage"]["prompt_tokens"] > 0 for event in found)
    assert [len(event["choices"]) for event in found] == [1] * (len(found) - 1) + [0]
    assert sum(len(choice.get("token_ids", ())) for event in found for choice in event["choices"]) == 3


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
