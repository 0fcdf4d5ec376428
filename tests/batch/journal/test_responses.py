"""Every field of a line is a function of row, tokens and job; tests/openai has the form of lines."""

import dataclasses
import json

import numpy as np

from ferrum_jax.batch.journal.responses import JobLabel, completed_line, reading_line
from ferrum_jax.core.outputs import EmbeddingOutput, Logprob, RequestOutput
from tests.batch.fake_llm import answer, output_of, row

JOB = JobLabel(model="tiny", created=1_700_000_000, fingerprint="fp_0")


def test_a_vector_that_is_cut_keeps_its_length_of_one():
    asked = row(input="abc", dimensions=2)
    vector = np.array([0.6, 0.0, 0.8], np.float32)
    output = EmbeddingOutput(prompt="abc", prompt_token_ids=(1,), embedding=vector, normalized=True)
    body = json.loads(reading_line(asked, [output], JOB))["response"]["body"]
    assert body["data"][0]["embedding"] == [1.0, 0.0]
    plain = dataclasses.replace(output, normalized=False)
    body = json.loads(reading_line(asked, [plain], JOB))["response"]["body"]
    assert body["data"][0]["embedding"] == [0.600000024, 0.0]


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
    line = json.loads(completed_line(row(prompt="x", logprobs=1), [output_of((5, 6), tops)], JOB))
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
        line = json.loads(completed_line(row(prompt="x", logprobs=1), [output_of((chosen,), tops)], JOB))
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
    line = json.loads(completed_line(asked, [output_of((5,), tops)], JOB))
    first = {"token": "\u00e9", "logprob": -0.5, "bytes": [0xC3, 0xA9]}
    second = {"token": "\ufffd", "logprob": -1.0, "bytes": None}
    found = line["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert found == [first | {"top_logprobs": [first, second]}]


def test_floats_have_nine_digits_and_an_impossible_token_minus_9999():
    tops = ({5: Logprob(logprob=-0.30000001192092896, rank=1), 6: Logprob(logprob=float("-inf"), rank=2)},)
    line = completed_line(row(prompt="x", logprobs=1), [output_of((5,), tops)], JOB)
    assert b"[-0.300000012]" in line and b'"token_id:6": -9999.0' in line


def _echoed(prompt: str, prompt_logprobs) -> RequestOutput:
    found = output_of((7,), ({7: Logprob(logprob=-0.5, rank=1, decoded_token="!")},))
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
