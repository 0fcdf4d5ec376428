"""Whatever interrupts a job, each row is answered once, and the file is that of an uninterrupted one."""

import concurrent.futures
import os
import re
import signal
from collections.abc import Callable

import pytest
from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_ROWS_FAILED,
    EXIT_TOO_MANY_ERRORS,
    run_batch,
)
from ferrum_jax.batch.notice import Notice
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.batch.job import BAD_LINES, GOOD_INPUT, ROWS, Job, at_step


def test_interrupted_at_any_step_the_job_goes_on_from_its_tokens_to_the_same_bytes(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[3])
    expected = job.whole()
    num_steps = job.llms[-1].num_steps
    for step in range(1, num_steps):
        assert job.run_to_step(step) == EXIT_PREEMPTED
        assert not job.output.exists()
        assert job.run() == EXIT_ROWS_FAILED
        assert job.output.read_bytes() == expected
        job.forget()
    assert sum(llm.num_resumed for llm in job.llms) > num_steps


SEVERAL = [
    {"custom_id": "p", "prompt": ["def f():", "class A:", "x = "], "max_tokens": 5, "n": 2, "logprobs": 0},
    {"custom_id": "q", "prompt": [[1, 2, 3], [4]], "max_tokens": 3},
    {"custom_id": "r", "prompt": ["a", "much too long for it", "b"], "max_tokens": 2},
    {"custom_id": "s", "input": ["abc", "de"]},
    *ROWS[:2],
]


def test_rows_of_several_prompts_go_on_from_the_tokens_of_each(tmp_path):
    job = Job(tmp_path, json_lines(SEVERAL))
    assert job.run(limit=15) == EXIT_ROWS_FAILED
    expected, num_steps, found = job.output.read_bytes(), job.llms[-1].num_steps, job.by_id()
    choices = found["p"]["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(6)) and len({c["text"] for c in choices}) == 6
    assert len(found["q"]["response"]["body"]["choices"]) == 2 and len(found["s"]["response"]["body"]["data"]) == 2
    assert found["r"]["error"]["message"] == "the prompt has 20 tokens, more than 15"
    for step in range(1, num_steps):
        job.forget()
        for width in (2, 1, 4, 3):
            job.run_to_step(step, width=width, limit=15)
        assert job.run(limit=15) == EXIT_ROWS_FAILED
        assert job.output.read_bytes() == expected
    assert sum(llm.num_resumed for llm in job.llms) > num_steps
    job.forget()
    num_starts = 1
    while job.run_to_step(1, width=3, limit=15) == EXIT_PREEMPTED:
        num_starts += 1
        assert num_starts < 100, "no start advances"
    assert job.output.read_bytes() == expected


def test_rows_in_progress_are_journaled_at_intervals_too(job, expected):
    assert job.run(on_step=at_step(4, interrupted), partials_s=0.0) == EXIT_INTERRUPTED
    assert job.run() == EXIT_OK
    assert job.llms[-1].num_resumed > 0 and job.output.read_bytes() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, EXIT_INTERRUPTED)])
def test_a_signal_ends_the_job_in_order_with_a_code_of_its_own(job, number, code):
    expected, handler = job.whole(), signal.getsignal(number)
    saved = []
    sends = at_step(2, lambda: os.kill(os.getpid(), number))
    assert job.run(on_step=sends, notice=Notice(saved.append)) == code
    assert saved == [job.llms[-1]] and job.llms[-1].is_closed and job.llms[-1].num_steps == 2
    assert "the same command goes on" in job.shown.getvalue() and signal.Signals(number).name in job.shown.getvalue()
    assert job.run() == EXIT_OK and job.llms[-1].num_resumed > 0
    assert job.output.read_bytes() == expected
    assert signal.getsignal(number) is handler


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was not heeded")


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("ends", "code"), [(terminated, EXIT_PREEMPTED), (interrupted, EXIT_INTERRUPTED)])
def test_what_ends_a_job_while_the_model_loads_ends_it_at_once(tmp_path, ends, code):
    job, console = Job(tmp_path), Console(quiet=True)
    assert run_batch(lambda start: ends(), job.input, job.output, model="tiny", console=console) == code


def test_a_job_stops_at_its_error_limit_and_goes_on_with_a_higher_one(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    assert job.run(limit=3, max_errors=0) == EXIT_TOO_MANY_ERRORS and job.llms == []
    assert job.run(limit=3, max_errors=1, width=1) == EXIT_TOO_MANY_ERRORS and not job.output.exists()
    shown = job.shown.getvalue()
    assert "more than 1 rows failed" in shown and "the same command with a higher --max-errors goes on" in shown
    assert "line 6: not valid JSON" in shown and re.search(r"'\w': the prompt has \d+ tokens, more than 3", shown)
    assert job.run(limit=3, max_errors=9) == EXIT_ROWS_FAILED
    assert len(job.lines()) == 6


def test_of_many_rows_that_failed_the_first_are_named_and_the_others_counted(tmp_path):
    job = Job(tmp_path, b"".join(b'{"custom_id": "%d", "prompt": "x", "top_k": -5}\n' % n for n in range(8)))
    assert job.run() == EXIT_ROWS_FAILED
    assert [line for line in range(1, 9) if f"line {line}: top_k is -5" in job.shown.getvalue()] == [1, 2, 3, 4, 5]
    assert "and 3 more" in job.shown.getvalue()


def test_a_job_whose_rows_are_all_done_says_too_that_more_failed_than_may(tmp_path):
    job = Job(tmp_path, BAD_LINES[1] + BAD_LINES[2])
    assert job.run(max_errors=1) == EXIT_TOO_MANY_ERRORS and len(job.lines()) == 2
    assert "All rows are done, and more than 1 rows failed" in job.shown.getvalue()


class Poison(RuntimeError):
    pass


def poisonous(*prompts: str) -> Callable[[FakeLLM], None]:
    def on_step(llm: FakeLLM) -> None:
        if any(row.prompt in prompts for row in llm.running):
            raise Poison("the device is on fire")

    return on_step


def test_a_row_that_crashes_the_engine_twice_is_set_aside_and_named(job, expected):
    assert job.run(on_step=poisonous("def g():")) == EXIT_ROWS_FAILED
    assert job.by_id()["b"]["error"] == {
        "code": "engine_crash",
        "message": "the engine crashed 2 times while it ran this row; the row is set aside",
    }
    assert "the engine crashed with Poison('the device is on fire')" in job.shown.getvalue()
    others = [line for line in expected.splitlines() if b'"custom_id": "b"' not in line]
    assert [line for line in job.output.read_bytes().splitlines() if b'"custom_id": "b"' not in line] == others


def test_crashes_are_remembered_over_restarts(job):
    notice = Notice()

    def on_step(llm: FakeLLM) -> None:
        notice.give("the test", EXIT_PREEMPTED)
        poisonous("def g():")(llm)

    assert job.run(on_step=on_step, notice=notice) == EXIT_PREEMPTED
    assert job.run(on_step=poisonous("def g():")) == EXIT_ROWS_FAILED
    assert job.by_id()["b"]["error"]["code"] == "engine_crash"


def test_an_engine_that_always_crashes_ends_the_job_and_blames_no_row(tmp_path):
    job = Job(tmp_path, json_lines({"custom_id": str(i), "prompt": f"p{i}"} for i in range(9)))
    with pytest.raises(Poison, match="on fire"):
        job.run(on_step=poisonous(*(f"p{i}" for i in range(9))), width=9)
    assert job.run() == EXIT_ROWS_FAILED
    assert sum(line["error"] is None for line in job.lines()) >= 5


def test_an_input_that_changes_while_the_job_runs_is_an_error_and_the_rest_goes_on(job, expected):
    changed = GOOD_INPUT.replace(b"class", b"CLASS").replace(b"def f", b"DEF F")
    with pytest.raises(OSError, match="of the input changed while the job ran; start the job again"):
        job.run(on_step=lambda llm: job.input.write_bytes(changed), width=1)
    job.input.write_bytes(GOOD_INPUT)
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected


def test_a_job_may_run_in_a_thread_of_its_own_and_is_told_by_its_notice(job, expected):
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(job.run_to_step, 2).result() == EXIT_PREEMPTED
        assert thread.submit(job.run).result() == EXIT_OK
    assert job.output.read_bytes() == expected
