"""Jobs go on from the chats of other jobs, as a second turn of each goes on."""

import json
from pathlib import Path

import pytest

from ferrum_jax.batch.earlier.fork import forked_lines
from ferrum_jax.batch.job import EXIT_ROWS_FAILED
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.job import Job
from tests.batch.running import run_rows
from tests.support import INVARIANT, small_llm

ASKED = [[{"role": "user", "content": text}] for text in ("Is water wet?", "Name a number.")]
CHATS = [
    {"custom_id": "a", "messages": ASKED[0], "max_tokens": 5, "cache_salt": "me"},
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED[1], "seed": 7}},
]
LEFT = [  # nothing goes on from these
    ({"custom_id": "text", "prompt": "x"}, "no chat"),
    ({"custom_id": "two", "messages": ASKED[0], "n": 2}, "2 answers"),
    ({"custom_id": "bad", "messages": ASKED[0], "temperatur": 1}, "failed"),
    ({"custom_id": "begun", "messages": [*ASKED[0], {"role": "assistant", "content": "No"}]}, "begun"),
]


def job_of(folder: Path, rows: list[dict]) -> Job:
    folder.mkdir()
    job = Job(folder, json_lines(rows))
    job.run(limit=500)
    return job


def texts(job: Job) -> list[str]:
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in job.lines()]


def rows_of(job: Job, turns: list[str], adapter: str | None = None) -> list[dict]:
    return [json.loads(line) for line in forked_lines(str(job.output), None, turns, adapter)]


def test_a_row_is_the_conversation_its_answer_and_a_turn(tmp_path):
    job = job_of(tmp_path / "first", CHATS)
    first, second = rows_of(job, ["Why?", "And then?"])
    said = [{"role": "assistant", "content": text} for text in texts(job)]
    turns = [[*ASKED[0], said[0], {"role": "user", "content": "Why?"}]]
    turns += [[*ASKED[1], said[1], {"role": "user", "content": "And then?"}]]
    kept = {"cache_salt": "me"}
    assert first == {"custom_id": "a", "messages": turns[0], **kept}, "how it is sampled is for the new job to say"
    assert second == {"custom_id": "b", "messages": turns[1]}
    assert [row["adapter"] for row in rows_of(job, ["Why?"], "critic")] == ["critic", "critic"]


def test_rows_with_nothing_to_go_on_from_fail_alone(tmp_path):
    job = job_of(tmp_path / "first", [*CHATS, *(row for row, _ in LEFT)])
    lines = b"".join(forked_lines(str(job.output), None, ["Why?"]))
    (tmp_path / "in.jsonl").write_bytes(lines)
    assert run_rows(tmp_path, lambda start: FakeLLM()) == EXIT_ROWS_FAILED
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert [line["custom_id"] for line in found] == ["a", "b", *(row["custom_id"] for row, _ in LEFT)]
    assert [line["error"] is None for line in found] == [True, True] + [False] * len(LEFT)
    assert all(why in line["error"]["message"] for line, (_, why) in zip(found[2:], LEFT, strict=True))


def test_what_does_not_belong_together_is_refused(tmp_path):
    job, texts_only = job_of(tmp_path / "first", CHATS), job_of(tmp_path / "texts", [LEFT[0][0]])
    with pytest.raises(ValueError, match="no row goes on"):
        rows_of(texts_only, ["Why?"])
    with pytest.raises(ValueError, match="2 rows, but there are 3 turns; give one each"):
        rows_of(job, ["Why?"] * 3)
    with pytest.raises(ValueError, match="is not the input that"):
        list(forked_lines(str(job.output), str(texts_only.input), ["Why?"]))
    content = job.input.read_text()
    job.input.write_text(content.replace("wet", "dry"))
    with pytest.raises(ValueError, match="is not the input that"):
        rows_of(job, ["Why?"])
    job.input.write_text(content)
    job.output.write_text(job.output.read_text().replace('"content": "', '"content": "no', 1))
    with pytest.raises(ValueError, match="edited or cut off"):
        rows_of(job, ["Why?"])


@pytest.mark.parametrize("edit", [lambda lines: lines[::-1], lambda lines: [*lines, lines[0]], lambda lines: [b"{}\n"]])
def test_of_an_output_whose_lines_are_others_nothing_is_read(edit, tmp_path):
    job = job_of(tmp_path / "first", CHATS)
    job.output.write_bytes(b"".join(edit(job.output.read_bytes().splitlines(True))))
    with pytest.raises(ValueError, match="edited or cut off"):
        next(forked_lines(str(job.output), None, ["Why?"]))


def test_a_forked_job_has_the_bytes_of_one_that_was_asked_for_both_turns(tmp_path):
    def answered(name: str, rows: bytes) -> Path:
        (tmp_path / "in.jsonl").write_bytes(rows)
        defaults = {"max_tokens": 6, "temperature": 0.9}
        assert run_rows(tmp_path, lambda start: small_llm("qwen3", INVARIANT), name, defaults=defaults) == 0
        return tmp_path / name

    first = answered("first.jsonl", json_lines(CHATS))
    forked = b"".join(forked_lines(str(first), None, ["Justify it."]))
    whole = [
        {"custom_id": "a", "messages": [*ASKED[0]], "cache_salt": "me"},
        {"custom_id": "b", "messages": [*ASKED[1]]},
    ]
    for row, line in zip(whole, first.read_bytes().splitlines(), strict=True):
        text = json.loads(line)["response"]["body"]["choices"][0]["message"]["content"]
        row["messages"] += [{"role": "assistant", "content": text}, {"role": "user", "content": "Justify it."}]
    assert answered("forked.jsonl", forked).read_bytes() == answered("whole.jsonl", json_lines(whole)).read_bytes()
