"""Every planted change is found: what was merely edited without a model, what was forged by answering again."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from ferrum_jax import LLM
from ferrum_jax.batch.job import EXIT_ROWS_FAILED
from ferrum_jax.batch.journal.job_record import record_of
from ferrum_jax.batch.verify.line_difference import BITS, DIFFERENT
from ferrum_jax.batch.verify.promise import other_model
from tests.batch.verify.planted import Written, verified, write_job
from tests.support import GOLDENS, INVARIANT, raising, small_llm

ROWS = [
    {"custom_id": "greedy", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "logprobs": 2},
    {"custom_id": "sampled", "prompt": "The sea is", "max_tokens": 8, "temperature": 0.9},
    {"custom_id": "other", "prompt": "The sky is", "max_tokens": 8, "temperature": 0.9},
    {"custom_id": "seeded", "prompt": "A list:", "max_tokens": 6, "seed": 11},
    {"custom_id": "ids", "prompt_token_ids": [7, 8, 9, 10], "max_tokens": 6, "temperature": 0},
    {"custom_id": "several", "prompt": ["One", "Two"], "n": 2, "max_tokens": 5},
    {"custom_id": "held", "prompt": "a", "max_tokens": 24, "structured_outputs": {"regex": "(ab|c){3,9}"}},
    {"custom_id": "vector", "input": "The sea"},
    {"custom_id": "packed", "input": "The sea", "encoding_format": "base64"},
    {"custom_id": "long", "prompt_token_ids": [5] * 300, "max_tokens": 4},
    {"custom_id": "typo", "prompt": "x", "temprature": 1},
    {"custom_id": "last", "prompt": "The end", "max_tokens": 4, "temperature": 0},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert write_job(folder, ROWS, lambda start: small_llm("qwen3", INVARIANT), seed=3) == EXIT_ROWS_FAILED
    return folder


@pytest.fixture
def job(whole, tmp_path) -> Path:
    for name in ("in.jsonl", "out.jsonl", "out.jsonl.report.json"):
        shutil.copy(whole / name, tmp_path / name)
    return tmp_path


def here() -> LLM:
    return small_llm("qwen3", INVARIANT)


no_model = raising(AssertionError("a model was loaded"))


def test_an_output_that_nobody_touched_is_right(job):
    found = verified(job, here)
    assert found.is_right and not found.findings.kept and not found.differing
    assert found.counts[BITS] == found.num_answered == len(ROWS) - 1 and found.num_lines == len(ROWS)


def swap(items: list, one: int, other: int) -> None:
    items[one], items[other] = items[other], items[one]


def swap_answers(w: Written, one: str = "sampled", other: str = "other") -> None:
    bodies = w.body(one), w.body(other)
    w.line(one)["response"]["body"], w.line(other)["response"]["body"] = bodies[::-1]


def swap_names(w: Written) -> None:
    w.line("sampled")["custom_id"], w.line("other")["custom_id"] = "other", "sampled_"
    w.lines[1]["custom_id"], w.lines[2]["custom_id"] = "other", "sampled"


def replace_by_error(w: Written) -> None:
    w.line("greedy").update(response=None, error={"code": "invalid_request", "message": "no"})


def replace_all_by_crashes(w: Written) -> None:
    for row, line in zip(w.rows, w.lines, strict=True):
        if row["custom_id"] != "typo":
            line.update(response=None, error={"code": "engine_crash", "message": "the row is set aside"})


def edit_letter(w: Written) -> None:
    put(w.choice("sampled"), "text", "x" + w.choice("sampled")["text"][1:])


def put(holder: dict | list, key, value) -> None:
    assert holder[key] != value
    holder[key] = value


# what is edited, by its name, with the code of the finding and how
EDITS = {
    "a text": ("line_changed", lambda w: put(w.choice("greedy"), "text", w.choice("greedy")["text"] + "!")),
    "a letter of a text": ("line_changed", edit_letter),
    "a token id": ("line_changed", lambda w: put(w.choice("ids")["token_ids"], 2, 1)),
    "a log-probability": ("line_changed", lambda w: put(w.choice("greedy")["logprobs"]["token_logprobs"], 1, -0.25)),
    "an alternative": ("line_changed", lambda w: w.choice("greedy")["logprobs"]["top_logprobs"][0].popitem()),
    "a finish reason": ("line_changed", lambda w: put(w.choice("greedy"), "finish_reason", "content_filter")),
    "completion tokens": ("line_changed", lambda w: put(w.body("greedy")["usage"], "completion_tokens", 80)),
    "prompt tokens": ("line_changed", lambda w: put(w.body("greedy")["usage"], "prompt_tokens", 80)),
    "a number of a vector": ("line_changed", lambda w: put(w.body("vector")["data"][0]["embedding"], 0, 0.5)),
    "a packed vector": ("line_changed", lambda w: put(w.body("packed")["data"][0], "embedding", "AAAA")),
    "a custom_id": ("line_changed", lambda w: put(w.line("greedy"), "custom_id", "eager")),
    "the custom_ids of two rows": ("line_changed", swap_names),
    "the answers of two rows": ("line_changed", swap_answers),
    "the order of two lines": ("moved", lambda w: swap(w.lines, 1, 2)),
    "a line doubled": ("doubled", lambda w: w.lines.append(w.lines[0])),
    "a line removed": ("missing", lambda w: w.lines.pop(4)),
    "the last line removed": ("missing", lambda w: w.lines.pop()),
    "a line of nobody": ("foreign", lambda w: w.lines.append(w.lines[0] | {"id": "batch_req_" + "0" * 32})),
    "an answer for an error": ("output_changed", replace_by_error),
    "an error for an answer": (
        "line_changed",
        lambda w: w.line("long").update(error=None, response=w.line("greedy")["response"]),
    ),
    "the error of a row that was refused": (
        "error_changed",
        lambda w: put(w.line("typo")["error"], "message", "line 11: all is well"),
    ),
    "the code of an error": ("output_changed", lambda w: put(w.line("long")["error"], "code", "engine_crash")),
    "a record removed": ("line_changed", lambda w: w.line("greedy")["response"].pop("record")),
    "a seed in a record": ("line_changed", lambda w: put(w.line("sampled")["response"]["record"], "seed", 4)),
    "tokens in a record": ("line_changed", lambda w: put(w.line("sampled")["response"]["record"], "tokens", "0" * 16)),
    "a line's digest": ("line_changed", lambda w: put(w.line("sampled")["response"]["record"], "line", "0" * 16)),
    "a fingerprint": ("line_changed", lambda w: put(w.body("greedy"), "system_fingerprint", "fp_0")),
    "when it was created": ("line_changed", lambda w: put(w.body("greedy"), "created", 1001)),
    "the model's name": ("line_changed", lambda w: put(w.body("greedy"), "model", "huge")),
    "a status": ("line_changed", lambda w: put(w.line("greedy")["response"], "status_code", 201)),
    "a request's id": ("line_changed", lambda w: put(w.line("greedy")["response"], "request_id", "req_1")),
    "a choice removed": ("line_changed", lambda w: w.body("several")["choices"].pop()),
    "the order of choices": ("line_changed", lambda w: swap(w.body("several")["choices"], 0, 1)),
    "a field of nobody": ("unreadable", lambda w: w.line("greedy").update(note="checked")),
    "a prompt in the input": ("request_changed", lambda w: put(w.row("greedy"), "prompt", "Once upon a time,")),
    "max_tokens in the input": ("request_changed", lambda w: put(w.row("greedy"), "max_tokens", 9)),
    "a temperature in the input": ("request_changed", lambda w: put(w.row("sampled"), "temperature", 0.8)),
    "a seed in the input": ("request_changed", lambda w: put(w.row("seeded"), "seed", 12)),
    "a grammar in the input": (
        "request_changed",
        lambda w: put(w.row("held"), "structured_outputs", {"regex": "(ab|d){3,9}"}),
    ),
    "a row removed from the input": ("foreign", lambda w: w.rows.pop(4)),
    "a row added to the input": ("missing", lambda w: w.rows.append({"custom_id": "new", "prompt": "x"})),
    "the order of the input": ("moved", lambda w: swap(w.rows, 1, 2)),
    "a custom_id in the input": ("foreign", lambda w: put(w.row("greedy"), "custom_id", "eager")),
    "the job's seed": ("report_changed", lambda w: put(w.record["settings"], "seed", 4)),
    "a sampling flag of the job": ("report_changed", lambda w: w.record["settings"].update(defaults={"top_k": 3})),
    "the weights of the model": ("report_changed", lambda w: put(w.record["model"], "weights", "00")),
    "the counts of the report": ("counts_differ", lambda w: put(w.report["rows"], "ok", 12)),
    "tokens in the report": ("report_changed", lambda w: put(w.report, "output_tokens", 1)),
    "the digest of the output": ("output_changed", lambda w: put(w.record, "output", "0" * 64)),
    "the fingerprint of the report": ("report_changed", lambda w: put(w.record, "fingerprint", "fp_0")),
    "the environment": ("report_changed", lambda w: w.report["environments"][0].update(mesh="tp=64")),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_is_found_in_any_line_without_a_model(job, what):
    code, edit = EDITS[what]
    written = Written.read(job)
    edit(written)
    written.write(job)
    found = verified(job, no_model, sample=0)
    assert not found.is_right and found.findings.counts[code], found.findings.sentences


def test_a_torn_line_is_found_and_the_others_are_read(job):
    content = (job / "out.jsonl").read_bytes()
    (job / "out.jsonl").write_bytes(content[:-40])
    found = verified(job, no_model, sample=0)
    assert {"unreadable", "missing", "output_changed"} <= set(found.findings.counts)
    assert found.num_lines == len(ROWS)


# what a forger changes who makes every digest anew, with the row that differs then
FORGED = {
    "a text": ("greedy", lambda w: put(w.choice("greedy"), "text", w.choice("greedy")["text"] + "!")),
    "a letter of a text": ("sampled", edit_letter),
    "a token id": ("ids", lambda w: put(w.choice("ids")["token_ids"], 2, 1)),
    "a log-probability": ("greedy", lambda w: put(w.choice("greedy")["logprobs"]["token_logprobs"], 1, -0.25)),
    "a finish reason": ("last", lambda w: put(w.choice("last"), "finish_reason", "stop")),
    "completion tokens": ("last", lambda w: put(w.body("last")["usage"], "completion_tokens", 5)),
    "a number of a vector": ("vector", lambda w: put(w.body("vector")["data"][0]["embedding"], 0, 0.5)),
    "a packed vector": ("packed", lambda w: put(w.body("packed")["data"][0], "embedding", "AAAAAA==")),
    "a seed in a record": ("sampled", lambda w: put(w.line("sampled")["response"]["record"], "seed", 4)),
    "tokens in a record": ("sampled", lambda w: put(w.line("sampled")["response"]["record"], "tokens", "0" * 16)),
    "the answers of two rows": ("sampled", swap_answers),
    "the order of choices": ("several", lambda w: swap(w.body("several")["choices"], 0, 2)),
    "an error for an answer": ("greedy", replace_by_error),
    "a crash for every answer": ("held", replace_all_by_crashes),
    "the error of a row that ran": ("long", lambda w: put(w.line("long")["error"], "message", "no")),
    "a prompt, and its line's ids": ("greedy", lambda w: w.ask_anew("greedy", prompt="Twice upon a time")),
    "a temperature, and its line's ids": ("sampled", lambda w: w.ask_anew("sampled", temperature=0.0)),
    "a grammar, and its line's ids": ("held", lambda w: w.ask_anew("held", structured_outputs={"regex": "d{3,9}"})),
    "the job's seed": ("sampled", lambda w: w.record["settings"].update(seed=4)),
    "a sampling flag of the job": ("sampled", lambda w: w.record["settings"].update(defaults={"top_k": 3})),
}  # fmt: skip


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_change_is_found_by_answering_again(job, what):
    row, edit = FORGED[what]
    written = Written.read(job)
    edit(written)
    num_failed = sum(line["error"] is not None for line in written.lines)
    written.report["rows"].update(ok=len(ROWS) - num_failed, failed=num_failed)
    written.forge()
    written.write(job)
    assert verified(job, no_model, sample=0).is_right, "the forger left a trace that needs no model"
    found = verified(job, here)
    assert found.counts[DIFFERENT] and not found.is_right
    assert row in [each.custom_id for each in found.differing]


def test_what_differs_is_named_with_its_token_and_margin(job):
    written = Written.read(job)
    text = written.choice("greedy")["text"]
    tokens = written.choice("greedy")["logprobs"]["tokens"]
    written.choice("greedy")["text"] = text[: len("".join(tokens[:3]))] + "#" + text
    written.forge()
    written.write(job)
    (row,) = verified(job, here).differing
    assert row.parting is not None and row.parting.margin is not None
    assert (row.parting.choice, row.parting.token, row.parting.here) == (0, 3, tokens[3])
    assert row.parting.margin > 0


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> LLM:
    """A model of the same spec, and so with the same executables; one of its tensors is another."""
    folder = tmp_path_factory.mktemp("other") / "qwen3"
    shutil.copytree(GOLDENS / "qwen3", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] = -tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return LLM(str(folder), INVARIANT)


def test_another_model_is_refused_by_the_name_of_what_differs(job, other):
    found = verified(job, lambda: other)
    assert not found.is_right and found.num_answered == 0
    (finding,) = found.findings.kept
    assert finding.code == "other_model" and "weights" in finding.message
    early = dataclasses.replace(other.identity, weights=None)
    assert other_model(record_of(str(job / "out.jsonl"), None), early) == [], "they are not read yet"


def test_a_report_that_was_made_to_fit_another_model_is_found_out(job, other):
    written = Written.read(job)
    written.record["model"] = dict(other.identity.values())
    written.forge()
    written.write(job)
    assert verified(job, no_model, sample=0).is_right
    assert verified(job, lambda: other).counts[DIFFERENT] > 5


def test_without_invariant_mode_an_answer_counts_within_rounding(job):
    loose = small_llm("qwen3")
    found = verified(job, lambda: loose)
    assert found.is_right and found.promise is not None and not found.promise.bits
    assert "does not run in invariant mode" in found.promise.why
    written = Written.read(job)
    written.choice("greedy")["logprobs"]["token_logprobs"][1] -= 0.1
    written.forge()
    written.write(job)
    found = verified(job, lambda: loose)
    assert [row.custom_id for row in found.differing] == ["greedy"] and found.counts[DIFFERENT] == 1


def test_in_another_environment_the_promise_says_what_is_other(job):
    written = Written.read(job)
    written.report["environments"][0]["jaxlib"] = "0.0.1"
    written.forge()
    written.write(job)
    found = verified(job, here)
    assert found.is_right and found.promise is not None and not found.promise.bits
    assert "the environment is another: jaxlib '0.0.1' and" in found.promise.why


def test_an_adapter_that_is_not_the_one_that_answered_is_found(tmp_path):
    slots = dataclasses.replace(INVARIANT, max_adapters=1, max_adapter_rank=8)

    def with_poet(folder: str) -> LLM:
        llm = LLM(str(GOLDENS / "llama"), slots)
        llm.load_adapter("poet", GOLDENS / "adapters" / folder)
        return llm

    rows = [{"custom_id": name, "prompt_token_ids": [7, 8, 9], "max_tokens": 6, "adapter": "poet"} for name in "ab"]
    write_job(tmp_path, rows, lambda start: with_poet("llama_patterns"), adapters=("poet",))
    assert verified(tmp_path, lambda: with_poet("llama_patterns")).is_right
    found = verified(tmp_path, lambda: with_poet("llama_attention"))
    (finding,) = found.findings.kept
    assert finding.code == "other_model" and "adapter" in finding.message
