"""What a job that is started again has its engine learn: the texts of its journal's answers, the newest first."""

import json

import numpy as np
import pytest

from ferrum_jax.batch import worker
from ferrum_jax.batch.input.formats import Row
from ferrum_jax.batch.input.rows import Rows
from ferrum_jax.batch.job import EXIT_PREEMPTED, EXIT_ROWS_FAILED
from ferrum_jax.batch.journal.journal import FAILED, OK, PARTIAL, Journal
from ferrum_jax.batch.journal.responses import JobLabel, answered_line, texts_of
from ferrum_jax.core.outputs import EmbeddingOutput, ScoreOutput
from ferrum_jax.io.files.store import Store
from tests.batch.conftest import NAMES
from tests.batch.fake_llm import FakeLLM, answer, json_lines, row
from tests.batch.job import BAD_LINES, GOOD_INPUT, Job

LABEL = JobLabel(model="tiny", created=1_700_000_000, fingerprint="fp_0")


def line_of(asked: Row) -> bytes:
    return answered_line(asked, [answer(prompt, asked.params) for prompt in asked.prompts], LABEL)


def read_again(store: Store, rows: Rows) -> Journal:
    journal = Journal(store, rows, "another")
    journal.refresh()
    return journal


# -- texts of lines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "def f():", "max_tokens": 4},
        {"prompt": "def f():", "max_tokens": 6, "n": 3, "logprobs": 1, "temperature": 0.8},
        {"messages": [{"role": "user", "content": "hi"}], "n": 2},
        {"prompt": ["a", "b"], "max_tokens": 5},
    ],
)
def test_a_line_gives_the_text_of_each_of_its_choices(asked):
    asked = row(**asked)
    outputs = [answer(prompt, asked.params) for prompt in asked.prompts]
    assert texts_of(line_of(asked)) == [choice.text for output in outputs for choice in output.outputs]


def test_a_line_of_vectors_scores_or_calls_alone_gives_no_text():
    vector = EmbeddingOutput(prompt=None, prompt_token_ids=(1, 2), embedding=np.array([0.5, 0.25], np.float32))
    pair, ranked = row(query="a", documents=["b"]), ScoreOutput(prompt_token_ids=(1,), score=0.5)
    assert texts_of(answered_line(row(input="abc"), [vector], LABEL)) == []
    assert texts_of(answered_line(pair, [ranked], LABEL)) == []
    called = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": []}}, {"text": ""}]}
    assert texts_of(json.dumps({"response": {"body": called}}).encode()) == []


# -- lines of journals -------------------------------------------------------------------------------------------------


def test_answers_are_whole_lines_of_rows_that_were_answered(store, rows):
    lines = {index: line_of(row(custom_id=name, prompt="x", n=2)) for index, name in enumerate(NAMES)}
    journal = Journal(store, rows, "w")
    journal.append(OK, 0, lines[0][:-1], 1)
    journal.append(FAILED, 1, b'{"custom_id": "b", "error": {}}', 1)
    journal.append(PARTIAL, 2, b"{}", 1)
    journal.flush()
    assert list(journal.answers(1 << 20)) == list(read_again(store, rows).answers(1 << 20)) == [(0, lines[0])]
    journal.append(OK, 2, lines[2][:-1], 1)
    journal.flush()
    assert list(read_again(store, rows).answers(1 << 20)) == [(2, lines[2]), (0, lines[0])], "the newest segment first"
    assert list(read_again(store, rows).answers(1)) == [(2, lines[2])]
    assert list(read_again(store, rows).answers(0)) == []


def test_of_a_torn_segment_the_whole_records_are_answers(store, rows):
    journal = Journal(store, rows, "w")
    lines = [line_of(row(custom_id=name, prompt="x", n=2)) for name in NAMES]
    for index, content in enumerate(lines):
        journal.append(OK, index, content[:-1], 1)
    journal.flush()
    (name,) = store.names("segments")
    whole = store.read(f"segments/{name}")
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for end in {0, 1, *ends, *(place - 1 for place in ends), *(place + 1 for place in ends[:-1])}:
        store.replace(f"segments/{name}", whole[:end])
        found = read_again(store, rows)
        assert sorted(found.answers(1 << 20)) == list(enumerate(lines[: sum(place <= end for place in ends)]))


# -- jobs --------------------------------------------------------------------------------------------------------------


MANY = [{"custom_id": str(i), "prompt": "p" * (1 + i), "max_tokens": 2 + i % 5, "n": 1 + i % 2} for i in range(12)]
MIXED = GOOD_INPUT + json_lines(MANY) + BAD_LINES[3] + json_lines([{"custom_id": "v", "input": "abc"}])


def test_a_job_that_is_started_again_learns_what_it_had_answered(tmp_path):
    job = Job(tmp_path, MIXED)
    expected, num_steps = job.whole(), job.llms[-1].num_steps
    assert job.llms[-1].learnt == [], "it began with nothing"
    answered = 0
    for step in range(2, num_steps, 3):
        assert job.run_to_step(step) == EXIT_PREEMPTED
        first = job.llms[-1]
        assert first.learnt == []
        code = job.run()
        assert code == EXIT_ROWS_FAILED and job.output.read_bytes() == expected
        texts = [text for text in _texts(job) if text in job.llms[-1].learnt]
        assert sorted(texts) == sorted(job.llms[-1].learnt), "each once, and nothing else"
        assert bool(texts) == bool(first.num_answered)
        answered += first.num_answered
        job.forget()
    assert answered > num_steps


def _texts(job: Job) -> list[str]:
    lines = job.output.read_bytes().splitlines()
    return [text for line in lines if json.loads(line)["response"] for text in texts_of(line)]


def test_a_job_killed_again_and_again_learns_more_at_every_start(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + json_lines(MANY))
    expected, code = job.whole(), EXIT_PREEMPTED
    while code == EXIT_PREEMPTED:
        code = job.run_to_step(3)
    counts = [len(llm.learnt) for llm in job.llms[1:]]
    assert job.output.read_bytes() == expected
    assert counts == sorted(counts) and counts[0] == 0 and len(set(counts)) > 3


def test_no_more_is_learnt_than_one_segment_beyond_the_bound(tmp_path, monkeypatch):
    job = Job(tmp_path, GOOD_INPUT + json_lines(MANY))
    monkeypatch.setattr(worker, "_LEARNT_BYTES", 1)
    code = EXIT_PREEMPTED
    while code == EXIT_PREEMPTED:
        code = job.run_to_step(3)
    assert 0 < len(job.llms[-1].learnt) < len(_texts(job)) / 2


def test_a_job_whose_rows_are_all_answered_teaches_nobody(tmp_path):
    job = Job(tmp_path, json_lines(MANY))
    job.run()
    job.output.unlink()
    job.run()
    assert len(job.llms) == 1 and isinstance(job.llms[0], FakeLLM)


def test_a_text_is_learnt_for_rows_of_its_own_cache_salt(tmp_path):
    tenants = [{"custom_id": f"t{i}", "prompt": "p" * (1 + i), "cache_salt": "ab"[i % 2]} for i in range(8)]
    job = Job(tmp_path, json_lines([*tenants, {"custom_id": "free", "prompt": "q"}, *MANY]))
    job.whole()
    assert job.run_to_step(job.llms[-1].num_steps - 1) == EXIT_PREEMPTED
    assert job.run() == 0 and {"a", "b"} <= set(job.llms[-1].salts)
