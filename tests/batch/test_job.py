"""Each line of a job's input is answered once: by the engine, or by an error that says what is wrong with it."""

import base64
import json

import numpy as np
import pytest

from ferrum_jax.batch.job import (
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_ROWS_FAILED,
)
from ferrum_jax.openai.logprob_forms import number
from tests.batch.fake_llm import json_lines
from tests.batch.job import ASKING, BAD_LINES, GOOD_INPUT, ROWS, Job


def test_every_line_of_input_is_answered_once(job):
    assert job.run() == EXIT_OK
    assert [line["custom_id"] for line in job.lines()] == ["a", "b", "c", "d", "e"]
    assert all(line["error"] is None for line in job.lines())
    assert job.llms[0].is_closed


def test_rows_are_read_only_as_the_engine_asks_for_them(job):
    job.run(width=2)
    assert job.llms[0].most_ahead == 2


def test_blank_lines_are_ignored_and_a_last_line_without_a_newline_counts(tmp_path):
    job = Job(tmp_path, b"\xef\xbb\xbf" + GOOD_INPUT.replace(b"\n", b"\r\n\n  \n").rstrip())
    assert job.run() == EXIT_OK
    assert len(job.lines()) == 5


def test_bad_lines_become_error_lines_and_the_rest_runs(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + b"".join(BAD_LINES))
    assert job.run() == EXIT_ROWS_FAILED
    errors = [line["error"] for line in job.lines() if line["error"]]
    assert [error["code"] for error in errors] == [
        "duplicate_custom_id",
        "invalid_json",
        "invalid_utf8",
        "missing_custom_id",
        "invalid_request",
    ]
    assert [error["message"].split(":")[0] for error in errors] == [f"line {number}" for number in range(6, 11)]
    assert [error["line"] for error in errors] == list(range(6, 11))
    names = [line["custom_id"] for line in job.lines()]
    assert names == ["a", "b", "c", "d", "e", "a", "line-7", "line-8", "line-9", "typo"]
    assert job.lines()[0]["response"]["status_code"] == 200


def test_of_three_rows_with_one_custom_id_the_first_is_answered(tmp_path):
    job = Job(tmp_path, GOOD_INPUT.splitlines(keepends=True)[0] * 3)
    assert job.run() == EXIT_ROWS_FAILED
    messages = [line["error"]["message"] for line in job.lines() if line["error"]]
    assert len(messages) == 2 and all("already that of line" in message for message in messages)
    assert [line["custom_id"] for line in job.lines()] == ["a"] * 3 and job.lines()[0]["error"] is None
    before = job.output.read_bytes()
    assert job.run() == EXIT_ROWS_FAILED and job.output.read_bytes() == before


def test_a_row_that_asks_for_another_model_is_not_answered_by_this_one(tmp_path):
    job = Job(tmp_path, json_lines([*ASKING, ROWS[0]]))
    assert job.run(names=["Org/Tiny"]) == EXIT_ROWS_FAILED
    found = job.by_id()
    assert [name for name, line in found.items() if line["error"] is None] == ["tiny", "Org/Tiny", "a"]
    error = found["gpt"]["error"]
    assert (error["code"], error["line"]) == ("model_not_found", 2)
    assert "model is 'gpt', and this job runs 'tiny'" in error["message"] and "'Org/Tiny'" in error["message"]
    assert {line["response"]["body"]["model"] for line in found.values() if line["response"]} == {"tiny"}


def test_a_row_that_asks_for_another_model_may_need_the_jobs_defaults_to_be_read(tmp_path):
    rows = [{"custom_id": name, "prompt": "x", "min_tokens": 50, "model": name} for name in ("gpt", "tiny")]
    job = Job(tmp_path, json_lines(rows))
    assert job.run(defaults={"max_tokens": 60}) == EXIT_ROWS_FAILED
    assert job.by_id()["gpt"]["error"]["code"] == "model_not_found" and job.by_id()["tiny"]["error"] is None
    job.forget()
    job.input.write_bytes(json.dumps(rows[0]).encode())
    with pytest.raises(ValueError, match=r"another model: 'gpt' \(1 rows\)"):
        job.run(defaults={"max_tokens": 60}, new_run=True)


def adapted(custom_id: str, **fields) -> bytes:
    return json_lines([{"custom_id": custom_id, "prompt": "x", "max_tokens": 2, **fields}])


def test_a_row_names_an_adapter_in_either_field_and_its_line_carries_it(tmp_path):
    asked = [{}, {"model": "poet"}, {"adapter": "poet"}, {"model": "tiny", "adapter": "clerk"}]
    wrong = [
        {"adapter": "nobody"},
        {"model": "poet", "adapter": "clerk"},
        {"prompt": None, "max_tokens": None, "input": "x", "model": "poet"},
    ]
    lines = [adapted(str(i), **fields) for i, fields in enumerate([*asked, *wrong])]
    lines.append(adapted("typed", adapter=7))
    job = Job(tmp_path, b"".join(lines))
    assert job.run(adapters=["poet", "clerk"]) == EXIT_ROWS_FAILED
    answers = job.lines()
    models = [answer["response"]["body"]["model"] for answer in answers[:4]]
    assert models == ["tiny", "poet", "poet", "clerk"]
    assert [answer["error"]["code"] for answer in answers[4:]] == ["model_not_found"] * 3 + ["invalid_request"]
    assert "this job has 'poet', 'clerk'; give the job --adapter nobody=DIR" in answers[4]["error"]["message"]
    assert "adapter is 7; it must be the name" in answers[7]["error"]["message"]


def test_a_job_whose_rows_all_ask_for_others_ends_before_the_model_loads(tmp_path):
    job = Job(tmp_path, json_lines([*ASKING[1:3], ASKING[1] | {"custom_id": "c"}]))
    with pytest.raises(ValueError, match=r"every row asks for another.*'gpt' \(2 rows\).*this one is 'tiny'.*--served"):
        job.run()
    assert job.llms == [] and [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_row_that_the_engine_refuses_fails_alone(job):
    assert job.run(limit=3) == EXIT_ROWS_FAILED
    found = job.by_id()
    assert found["d"]["error"] is None and found["c"]["error"] is None
    assert found["a"]["error"] == {"code": "invalid_request", "message": "the prompt has 8 tokens, more than 3"}


def test_a_structure_that_is_cut_off_is_an_error_where_that_is_asked_for(tmp_path):
    rows = [{"custom_id": "free", "prompt": "x"}, {"custom_id": "held", "prompt": "x", "n": 2, "max_tokens": 5}]
    rows[1]["structured_outputs"] = {"regex": "a{9}"}
    job = Job(tmp_path, json_lines(rows))
    assert job.run() == EXIT_OK and job.by_id()["held"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ValueError, match="begun with other settings: require valid"):
        job.run(require_valid=True)
    job.forget()
    assert job.run(require_valid=True) == EXIT_ROWS_FAILED
    assert job.by_id()["free"]["error"] is None and job.by_id()["held"]["error"] == {
        "code": "structure_cut_off",
        "message": "max_tokens cut choice 0 off after 5 tokens, before its structure was whole",
    }


def test_an_input_of_bad_lines_alone_or_an_empty_one_loads_no_model(tmp_path):
    job = Job(tmp_path, BAD_LINES[1])
    assert job.run() == EXIT_ROWS_FAILED
    job.forget()
    job.input.write_bytes(b"\n")
    assert job.run() == EXIT_OK
    assert job.llms == [] and job.output.read_bytes() == b""


def test_another_seed_draws_other_tokens_and_a_rows_own_seed_does_not_care(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + json_lines([{"custom_id": "own", "prompt": "x", "seed": 7}]))
    job.run()
    first = job.by_id()
    job.forget()
    job.run(seed=1)
    second = job.by_id()

    def choices(line: dict) -> list:
        return line["response"]["body"]["choices"]

    assert choices(first["own"]) == choices(second["own"])
    assert choices(first["a"]) != choices(second["a"])


def test_vectors_and_texts_are_answered_in_one_job_and_either_may_be_interrupted(tmp_path):
    vectors = [{"custom_id": f"v{i}", "input": "some text" + "!" * (i % 4)} for i in range(9)]
    vectors.append({"custom_id": "long", "input": "long " * 9})
    vectors[1] |= {"dimensions": 2, "encoding_format": "base64"}
    vectors[3] = {"custom_id": "s", "text_1": "a query", "text_2": ["one", "another"]}
    vectors[4] = {"custom_id": "r", "query": "a query", "documents": ["the longest of all", "short"], "top_n": 1}
    mixed = [row for pair in zip(vectors, ROWS * 2, strict=True) for row in pair][:15]
    unique = {row["custom_id"]: row for row in mixed}.values()
    job = Job(tmp_path, json_lines(unique))
    expected = job.whole(limit=30)
    assert job.run_to_step(2, limit=30) == EXIT_PREEMPTED
    assert job.run(limit=30) == EXIT_OK
    assert job.output.read_bytes() == expected
    assert [line["custom_id"] for line in job.lines()] == [row["custom_id"] for row in unique]
    body = job.by_id()["v0"]["response"]["body"]
    assert body["object"] == "list" and len(body["data"][0]["embedding"]) == 3
    cut = job.by_id()["v1"]["response"]["body"]["data"][0]["embedding"]
    assert len(np.frombuffer(base64.b64decode(cut), "<f4")) == 2
    scores = job.by_id()["s"]["response"]["body"]["data"]
    assert [entry["score"] for entry in scores] == [0.1, number(1 / 14)]
    (best,) = job.by_id()["r"]["response"]["body"]["results"]
    assert best["index"] == 1 and best["document"] == {"text": "short"}


def test_a_vector_that_is_too_short_and_a_pair_that_is_too_long_fail_alone(tmp_path):
    rows = [
        {"custom_id": "short", "input": "some text", "dimensions": 4},
        {"custom_id": "long", "text_1": "a query", "text_2": "far too long " * 9},
        {"custom_id": "good", "text_1": "a query", "text_2": "a document"},
    ]
    job = Job(tmp_path, json_lines(rows))
    assert job.run(limit=30) == EXIT_ROWS_FAILED
    assert "dimensions is 4; the model's vectors have 3" in job.by_id()["short"]["error"]["message"]
    assert "the pair has" in job.by_id()["long"]["error"]["message"]
    assert job.by_id()["good"]["response"]["body"]["data"][0]["score"] == number(1 / 17)
