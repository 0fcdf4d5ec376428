"""Lines of output have the OpenAI batch form, and every field is a function of row, tokens and job."""

import dataclasses
import json
import re
from unittest.mock import ANY

import numpy as np

from ferrum_jax.asked.message import AssistantMessage, ToolCall
from ferrum_jax.batch.input.formats import BadRow, Row, parse_line
from ferrum_jax.batch.journal.responses import JobLabel, completed_line, embedding_line, failed_line
from ferrum_jax.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
from tests.batch.fake_llm import answer

JOB = JobLabel(model="tiny", created=1_700_000_000, fingerprint="fp_0")


def row(**fields) -> Row:
    found = parse_line(json.dumps({"custom_id": "a", **fields}).encode(), 1)
    assert isinstance(found, Row), found
    return found


def output(token_ids: tuple[int, ...], logprobs: tuple[dict[int, Logprob], ...]) -> RequestOutput:
    choice = CompletionOutput(
        index=0,
        text="",
        token_ids=token_ids,
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason="stop",
        stop_reason=None,
    )
    return RequestOutput(request_id=0, prompt=None, prompt_token_ids=(1,), outputs=(choice,), num_cached_tokens=0)


def line_of(asked: Row) -> dict:
    return json.loads(completed_line(asked, [answer(asked.prompt, asked.params)], JOB))


def test_a_completion_has_the_openai_form():
    asked = row(prompt="abc", max_tokens=4, n=2)
    line = line_of(asked)
    choices = line["response"]["body"].pop("choices")
    assert line == {
        "id": f"batch_req_{asked.id}",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": f"req_{asked.id}",
            "body": {
                "id": f"cmpl-{asked.id}",
                "object": "text_completion",
                "created": 1_700_000_000,
                "model": "tiny",
                "system_fingerprint": "fp_0",
                "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10},
            },
        },
        "error": None,
    }
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["text"] != choices[1]["text"]
    assert {key: choices[0][key] for key in ("logprobs", "finish_reason")} == {
        "logprobs": None,
        "finish_reason": "length",
    }


def test_a_chat_has_the_openai_form():
    body = line_of(row(messages=[{"role": "user", "content": "hi"}], max_tokens=4))["response"]["body"]
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert len(body["choices"][0]["message"]["content"]) == 4


def test_a_chat_that_calls_tools_has_the_openai_form():
    asked = row(messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    said = AssistantMessage(content="", reasoning="hm", tool_calls=(ToolCall(name="f", arguments='{"a": "é"}'),))
    made = output((1,), ())
    made = dataclasses.replace(made, outputs=(dataclasses.replace(made.outputs[0], logprobs=None, message=said),))
    choice = json.loads(completed_line(asked, [made], JOB))["response"]["body"]["choices"][0]
    call = {"id": ANY, "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    assert choice["message"] == {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}
    assert re.fullmatch("[0-9a-f]{9}", choice["message"]["tool_calls"][0]["id"])
    assert choice["finish_reason"] == "tool_calls"


def test_an_embedding_has_the_openai_form():
    asked = row(input="abc")
    vector = np.array([0.1, -2.0], np.float32)
    output = EmbeddingOutput(prompt="abc", prompt_token_ids=(1, 2, 3), embedding=vector, num_cached_tokens=2)
    body = json.loads(embedding_line(asked, [output], JOB))["response"]["body"]
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.100000001, -2.0]}],
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_0",
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


def test_a_vector_that_is_cut_keeps_its_length_of_one():
    asked = row(input="abc", dimensions=2)
    vector = np.array([0.6, 0.0, 0.8], np.float32)
    output = EmbeddingOutput(prompt="abc", prompt_token_ids=(1,), embedding=vector, normalized=True)
    body = json.loads(embedding_line(asked, [output], JOB))["response"]["body"]
    assert body["data"][0]["embedding"] == [1.0, 0.0]
    plain = dataclasses.replace(output, normalized=False)
    body = json.loads(embedding_line(asked, [plain], JOB))["response"]["body"]
    assert body["data"][0]["embedding"] == [0.600000024, 0.0]


def test_an_error_has_no_response_but_code_and_message():
    line = failed_line(BadRow(id="0" * 32, custom_id=None, code="invalid_json", message="line 3: no", line=3))
    assert json.loads(line) == {
        "id": "batch_req_" + "0" * 32,
        "custom_id": "line-3",
        "response": None,
        "error": {"code": "invalid_json", "message": "line 3: no", "line": 3},
    }
    ran = json.loads(failed_line(BadRow(id="0" * 32, custom_id="a", code="engine_crash", message="no")))
    assert ran["custom_id"] == "a" and ran["error"] == {"code": "engine_crash", "message": "no"}


def test_every_line_is_ascii_ends_in_one_newline_and_starts_with_the_prefix():
    asked = row(prompt="\u00fc\u2028\n", max_tokens=2)
    line = completed_line(asked, [answer(asked.prompt, asked.params)], JOB)
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n") and line.startswith(b'{"id": "batch_req_')


def test_a_cached_prefix_does_not_change_the_line():
    asked = row(prompt="abc", max_tokens=4)
    found = answer(asked.prompt, asked.params)
    other = RequestOutput(
        request_id=9, prompt=None, prompt_token_ids=found.prompt_token_ids, outputs=found.outputs, num_cached_tokens=0
    )
    assert completed_line(asked, [found], JOB) == completed_line(asked, [other], JOB)


def test_completion_logprobs_are_four_lists_with_an_entry_a_token():
    tops = (
        {5: Logprob(logprob=-0.5, rank=1, decoded_token="ab"), 6: Logprob(logprob=-1.0, rank=2, decoded_token="c")},
        {6: Logprob(logprob=-2.0, rank=3, decoded_token="c"), 5: Logprob(logprob=-0.1, rank=1, decoded_token="ab")},
    )
    line = json.loads(completed_line(row(prompt="x", logprobs=1), [output((5, 6), tops)], JOB))
    assert line["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"ab": -0.5, "c": -1.0}, {"ab": -0.1, "c": -2.0}],
        "text_offset": [0, 2],
    }


def test_tokens_that_share_a_text_or_have_none_are_told_apart_by_their_id():
    tops = (
        {
            5: Logprob(logprob=-0.5, rank=1, decoded_token="\ufffd"),
            6: Logprob(logprob=-1.0, rank=2, decoded_token="\ufffd"),
            7: Logprob(logprob=-2.0, rank=3),
        },
    )
    for chosen, other in ((5, 6), (6, 5)):
        line = json.loads(completed_line(row(prompt="x", logprobs=1), [output((chosen,), tops)], JOB))
        found = line["response"]["body"]["choices"][0]["logprobs"]
        assert set(found["top_logprobs"][0]) == {"\ufffd", f"token_id:{other}", "token_id:7"}
        assert found["top_logprobs"][0][found["tokens"][0]] == found["token_logprobs"][0]


def test_chat_logprobs_have_the_bytes_of_tokens_whose_text_tells_them():
    tops = (
        {
            5: Logprob(logprob=-0.5, rank=1, decoded_token="\u00e9"),
            6: Logprob(logprob=-1.0, rank=2, decoded_token="\ufffd"),
        },
    )
    asked = row(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2)
    line = json.loads(completed_line(asked, [output((5,), tops)], JOB))
    first = {"token": "\u00e9", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    second = {"token": "\ufffd", "logprob": -1.0, "bytes": None}
    found = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert found == [first | {"top_logprobs": [first, second]}]


def test_prompt_logprobs_are_by_token_id_and_the_first_is_null():
    body = line_of(row(prompt_token_ids=[3, 4], prompt_logprobs=0, max_tokens=1))["response"]["body"]
    assert body["choices"][0]["prompt_logprobs"] == [None, {"4": {"logprob": -1.5, "rank": 1, "decoded_token": None}}]


def test_token_ids_are_in_the_choice_where_they_come_back():
    asked = row(prompt_token_ids=[3, 4], max_tokens=3)
    choice = line_of(asked)["response"]["body"]["choices"][0]
    assert choice["token_ids"] == list(answer(asked.prompt, asked.params).token_ids)


def test_floats_have_nine_digits_and_an_impossible_token_minus_9999():
    tops = ({5: Logprob(logprob=-0.30000001192092896, rank=1), 6: Logprob(logprob=float("-inf"), rank=2)},)
    line = completed_line(row(prompt="x", logprobs=1), [output((5,), tops)], JOB)
    assert b"[-0.300000012]" in line and b'"token_id:6": -9999.0' in line


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt():
    asked = row(prompt=["abc", "de"], n=2, prompt_logprobs=0)
    outputs = [answer(prompt, asked.params_of(part)) for part, prompt in enumerate(asked.prompts)]
    body = json.loads(completed_line(asked, outputs, JOB))["response"]["body"]
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [c.text for output in outputs for c in output.outputs]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2] and "prompt_logprobs" not in body
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == sum(len(c.token_ids) for output in outputs for c in output.outputs)


def test_vectors_of_several_texts_are_numbered():
    asked = row(input=["abc", "de"])
    vectors = [
        EmbeddingOutput(prompt=None, prompt_token_ids=(1,) * n, embedding=np.full(2, n, np.float32)) for n in (3, 2)
    ]
    body = json.loads(embedding_line(asked, vectors, JOB))["response"]["body"]
    assert [(entry["index"], entry["embedding"]) for entry in body["data"]] == [(0, [3.0, 3.0]), (1, [2.0, 2.0])]
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}


def _echoed(prompt: str, prompt_logprobs) -> RequestOutput:
    found = output((7,), ({7: Logprob(logprob=-0.5, rank=1, decoded_token="!")},))
    choice = dataclasses.replace(found.outputs[0], text=prompt + "!")
    return dataclasses.replace(
        found, prompt=prompt, prompt_token_ids=(5, 6), outputs=(choice,), prompt_logprobs=prompt_logprobs
    )


def test_an_echo_has_the_prompts_tokens_before_those_of_the_output():
    tops = (None, {6: Logprob(logprob=-2.0, rank=3, decoded_token="bc"), 9: Logprob(logprob=-1.0, rank=1)})
    asked = row(prompt="abc", echo=True, logprobs=1)
    choice = json.loads(completed_line(asked, [_echoed("abc", tops)], JOB))["response"]["body"]["choices"][0]
    assert choice["text"] == "abc!"
    assert choice["logprobs"]["tokens"] == ["a", "bc", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"token_id:9": -1.0, "bc": -2.0}, {"!": -0.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 3]
    unlike = (None, {6: Logprob(logprob=-2.0, rank=3, decoded_token="\ufffd")})
    choice = json.loads(completed_line(asked, [_echoed("abc", unlike)], JOB))["response"]["body"]["choices"][0]
    assert choice["logprobs"]["tokens"][0] == "token_id:5"


def test_an_echo_alone_has_no_output():
    asked = row(prompt="abc", echo=True, max_tokens=0, logprobs=0, return_token_ids=True)
    tops = (None, {6: Logprob(logprob=-2.0, rank=3, decoded_token="bc")})
    body = json.loads(completed_line(asked, [_echoed("abc", tops)], JOB))["response"]["body"]
    choice = body["choices"][0]
    assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]) == ("abc", [], ["a", "bc"])
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_the_echo_of_a_chat_is_the_message_that_goes_on():
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so far"}]
    found = output((5,), None)
    for given, lead in ((messages, "so far"), (messages[:1], "")):
        asked = row(messages=given, echo=True)
        line = json.loads(completed_line(asked, [found], JOB))
        assert line["response"]["body"]["choices"][0]["message"]["content"] == lead


def test_an_answer_is_written_as_its_row_asks():
    """Tokens by their ids, no alternatives, and nothing of what was thought."""
    chat = [{"role": "user", "content": "x"}]
    tops = ({5: Logprob(logprob=-0.5, rank=1, decoded_token="e"), 6: Logprob(logprob=-1.0, rank=2, decoded_token="f")},)
    asked = row(messages=chat, logprobs=True, top_logprobs=0, return_tokens_as_token_ids=True, include_reasoning=False)
    made = output((5,), tops)
    said = AssistantMessage(content="e", reasoning="hm")
    made = dataclasses.replace(made, outputs=(dataclasses.replace(made.outputs[0], message=said),))
    choice = json.loads(completed_line(asked, [made], JOB))["response"]["body"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "e"}
    token = {"token": "token_id:5", "logprob": -0.5, "bytes": [101], "top_logprobs": []}
    assert choice["logprobs"]["content"] == [token]
    asked = row(prompt="x", logprobs=1, return_tokens_as_token_ids=True)
    found = json.loads(completed_line(asked, [output((5,), tops)], JOB))["response"]["body"]["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:5"] and set(found["top_logprobs"][0]) == {"token_id:5", "token_id:6"}
