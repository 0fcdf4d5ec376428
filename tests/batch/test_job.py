"""A job answers each line of its input once, whatever interrupts it, and the file is that of an uninterrupted one."""

import base64
import concurrent.futures
import contextlib
import errno
import functools
import html
import io
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_ROWS_FAILED,
    EXIT_TOO_MANY_ERRORS,
    JobOptions,
    JobSettings,
    JobStart,
    run_batch,
)
from ferrum_jax.batch.journal.journal_file import object_in
from ferrum_jax.batch.notice import Notice
from ferrum_jax.batch.report.page import page
from ferrum_jax.io.files.store import LocalStore, UrlStore, open_store, split
from ferrum_jax.openai.logprob_forms import number
from tests.batch.fake_llm import FakeLLM, json_lines

ROWS = [
    {"custom_id": "a", "prompt": "def f():", "max_tokens": 4},
    {"custom_id": "b", "prompt": "def g():", "max_tokens": 4, "temperature": 0.8, "n": 2, "logprobs": 0},
    {"custom_id": "c", "messages": [{"role": "user", "content": "hi"}]},
    {
        "custom_id": "d",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 2},
    },
    {"custom_id": "e", "prompt": "class A:", "max_tokens": 3},
]
BAD_LINES = [
    b'{"custom_id": "a", "prompt": "again"}\n',
    b'{"custom_id": "torn", "prom\n',
    b'{"custom_id": "latin", "prompt": "\xe9"}\n',
    b'{"prompt": "nameless"}\n',
    b'{"custom_id": "typo", "prompt": "x", "temprature": 1}\n',
]
GOOD_INPUT = json_lines(ROWS)


class Job:
    """A job in a folder of its own; each start is at another time of day and finishes rows in another order."""

    def __init__(self, folder: Path, content: bytes = GOOD_INPUT) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_bytes(content)
        self.llms: list[FakeLLM] = []
        self.clock = itertools.count(1_000)
        self.shown = io.StringIO()

    def run(
        self,
        *,
        model: str = "tiny",
        seed: int = 0,
        settings: dict | None = None,
        defaults: dict | None = None,
        notice: Notice | None = None,
        store: Callable = lambda path: LocalStore(Path(path)),
        max_errors: int | None = None,
        partials_s: float = 60.0,
        page_path: str | None = None,
        expiry_s: float = 5.0,
        names: Sequence[str] = (),
        adapters: Sequence[str] = (),
        new_run: bool = False,
        strict_bits: bool = False,
        require_valid: bool = False,
        llm: type[FakeLLM] = FakeLLM,
        **fake,
    ) -> int:
        def make(start: JobStart) -> FakeLLM:
            self.llms.append(llm(order=len(self.llms), **fake))
            return self.llms[-1]

        return run_batch(
            make,
            self.input,
            self.output,
            model=model,
            settings=JobSettings(
                names=names,
                adapters=adapters,
                seed=seed,
                defaults=defaults or {},
                require_valid=require_valid,
                others=settings or {},
                now=lambda: next(self.clock),
            ),
            options=JobOptions(
                max_errors=max_errors,
                partials_s=partials_s,
                poll_s=0.01,
                expiry_s=expiry_s,
                new_run=new_run,
                strict_bits=strict_bits,
                page_path=page_path,
                open_store=store,
            ),
            console=Console(file=self.shown, width=100),
            notice=notice,
        )

    def run_to_step(self, step: int, **kwargs) -> int:
        """A run that gets its notice at this step of the engine."""
        notice = Notice()

        def on_step(llm: FakeLLM) -> None:
            if llm.num_steps == step:
                notice.give("the test", EXIT_PREEMPTED)

        return self.run(notice=notice, on_step=on_step, **kwargs)

    def forget(self) -> None:
        """As if the job had never run."""
        self.output.unlink(missing_ok=True)
        shutil.rmtree(f"{self.output}.journal", ignore_errors=True)
        self.clock = itertools.count(1_000)

    def whole(self, **kwargs) -> bytes:
        """The output of a job that nothing interrupts; it is forgotten."""
        self.run(**kwargs)
        content = self.output.read_bytes()
        self.forget()
        return content

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def report(self) -> dict:
        return json.loads(Path(f"{self.output}.report.json").read_bytes())

    def by_id(self) -> dict[str, dict]:
        return {line["custom_id"]: line for line in self.lines()}


def test_every_line_of_input_is_answered_once(tmp_path):
    job = Job(tmp_path)
    assert job.run() == EXIT_OK
    assert [line["custom_id"] for line in job.lines()] == ["a", "b", "c", "d", "e"]
    assert all(line["error"] is None for line in job.lines())
    assert job.llms[0].is_closed


def test_rows_are_read_only_as_the_engine_asks_for_them(tmp_path):
    job = Job(tmp_path)
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


ASKING = [{"custom_id": name, "prompt": "x", "model": name} for name in ("tiny", "gpt", "gpt2", "Org/Tiny")]


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


def test_a_job_goes_on_only_with_the_adapters_that_it_was_begun_with(tmp_path):
    job = Job(tmp_path, b"".join(adapted(str(i), **({"model": "poet"} if i % 2 else {})) for i in range(9)))
    expected = job.whole(adapters=["poet"])
    assert job.run_to_step(2, adapters=["poet"]) == EXIT_PREEMPTED
    for others in ([], ["poet", "clerk"]):
        with pytest.raises(ValueError, match=r"begun with other settings: adapters \[\"poet\"\], now"):
            job.run(adapters=others)
    assert job.run(adapters=["poet"]) == EXIT_OK
    assert job.output.read_bytes() == expected
    with pytest.raises(ValueError, match="both called 'tiny'"):
        job.run(adapters=["tiny"])


def test_a_job_whose_rows_all_ask_for_others_ends_before_the_model_loads(tmp_path):
    job = Job(tmp_path, json_lines([*ASKING[1:3], ASKING[1] | {"custom_id": "c"}]))
    with pytest.raises(ValueError, match=r"every row asks for another.*'gpt' \(2 rows\).*this one is 'tiny'.*--served"):
        job.run()
    assert job.llms == [] and [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_job_that_goes_on_knows_the_names_that_it_was_begun_with_and_learns_others(tmp_path):
    job = Job(tmp_path, json_lines(ASKING))
    assert job.run_to_step(3, names=["gpt"]) == EXIT_PREEMPTED
    assert job.run(names=["gpt2", "Org/Tiny"]) == EXIT_OK
    assert all(line["error"] is None for line in job.lines())


def test_a_row_that_the_engine_refuses_fails_alone(tmp_path):
    job = Job(tmp_path)
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


def test_a_finished_job_started_again_changes_nothing_and_loads_no_model(tmp_path):
    job = Job(tmp_path)
    job.run()
    before = job.output.read_bytes()
    assert job.run() == EXIT_OK
    assert job.output.read_bytes() == before and len(job.llms) == 1


def test_an_input_of_bad_lines_alone_or_an_empty_one_loads_no_model(tmp_path):
    job = Job(tmp_path, BAD_LINES[1])
    assert job.run() == EXIT_ROWS_FAILED
    job.forget()
    job.input.write_bytes(b"\n")
    assert job.run() == EXIT_OK
    assert job.llms == [] and job.output.read_bytes() == b""


def test_two_jobs_in_other_orders_and_widths_write_the_same_bytes(tmp_path):
    job = Job(tmp_path, BAD_LINES[1] + GOOD_INPUT)
    assert job.whole(width=1) == job.whole(width=5)


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


def test_interrupted_again_and_again_the_job_advances_at_every_start(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()
    for _ in range(100):
        if job.run_to_step(1, width=2) == EXIT_OK:
            break
    assert job.output.read_bytes() == expected and 10 < len(job.llms) < 60
    assert job.by_id()["a"]["response"]["body"]["created"] == 1_000


def test_rows_in_progress_are_journaled_at_intervals_too(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()

    def dies(llm: FakeLLM) -> None:
        if llm.num_steps == 4:
            raise KeyboardInterrupt

    assert job.run(on_step=dies, partials_s=0.0) == EXIT_INTERRUPTED
    assert job.run() == EXIT_OK
    assert job.llms[-1].num_resumed > 0 and job.output.read_bytes() == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, EXIT_INTERRUPTED)])
def test_a_signal_ends_the_job_in_order_with_a_code_of_its_own(tmp_path, number, code):
    job = Job(tmp_path)
    expected, handler = job.whole(), signal.getsignal(number)
    saved = []

    def on_step(llm: FakeLLM) -> None:
        if llm.num_steps == 2:
            os.kill(os.getpid(), number)

    assert job.run(on_step=on_step, notice=Notice(saved.append)) == code
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


def test_a_row_that_crashes_the_engine_twice_is_set_aside_and_named(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()
    assert job.run(on_step=poisonous("def g():")) == EXIT_ROWS_FAILED
    assert job.by_id()["b"]["error"] == {
        "code": "engine_crash",
        "message": "the engine crashed 2 times while it ran this row; the row is set aside",
    }
    assert "the engine crashed with Poison('the device is on fire')" in job.shown.getvalue()
    others = [line for line in expected.splitlines() if b'"custom_id": "b"' not in line]
    assert [line for line in job.output.read_bytes().splitlines() if b'"custom_id": "b"' not in line] == others


def test_crashes_are_remembered_over_restarts(tmp_path):
    job = Job(tmp_path)
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


def test_a_changed_row_is_refused_before_the_model_loads_and_nothing_is_written(tmp_path):
    job = Job(tmp_path)
    job.run()
    before = job.output.read_bytes()
    job.input.write_bytes(GOOD_INPUT.replace(b"def f", b"def h"))
    with pytest.raises(ValueError, match=r"whose content was another: 'a' \(1 in all\).*give changed rows another"):
        job.run()
    assert job.output.read_bytes() == before and len(job.llms) == 1


def test_rows_may_be_added_but_not_taken_away(tmp_path):
    job = Job(tmp_path)
    job.run()
    job.input.write_bytes(b'{"custom_id": "f", "prompt": "new"}\n' + GOOD_INPUT)
    assert job.run() == EXIT_OK
    assert len(job.lines()) == 6 and job.llms[-1].num_pulled == 1
    job.input.write_bytes(GOOD_INPUT)
    with pytest.raises(ValueError, match=r"rows that are not in the input.*'f'"):
        job.run()


def test_while_a_worker_runs_another_input_is_refused_before_its_model_loads(tmp_path):
    job, more, other = Job(tmp_path), Job(tmp_path), Job(tmp_path)
    more.input, other.input = tmp_path / "more.jsonl", tmp_path / "other.jsonl"
    more.input.write_bytes(GOOD_INPUT + json_lines([{"custom_id": "added", "prompt": "x"}]))
    other.input.write_bytes(json_lines([{"custom_id": "x", "prompt": "x"}]))

    def on_step(llm: FakeLLM) -> None:
        if llm.num_steps == 1:
            for late in (more, other):
                with pytest.raises(ValueError, match=r"worker \w+ is at work on this job with another input"):
                    late.run()

    assert job.run(on_step=on_step) == 0 and not more.llms and not other.llms
    assert len(job.lines()) == len(ROWS)
    assert more.run() == 0 and len(more.lines()) == len(ROWS) + 1, "rows may be added when nobody runs the old ones"


@pytest.mark.parametrize("other", [{"model": "big"}, {"seed": 1}, {"settings": {"dtype": "bfloat16"}}])
def test_a_job_does_not_go_on_with_other_settings(tmp_path, other):
    job = Job(tmp_path)
    job.run_to_step(2)
    with pytest.raises(ValueError, match="was begun with other settings"):
        job.run(**other)


def test_a_jobs_defaults_are_those_of_its_rows_and_a_setting(tmp_path):
    job = Job(tmp_path)
    plain = job.whole()
    job.run_to_step(2, defaults={"max_tokens": 3, "n": 2})
    record = object_in((tmp_path / "out.jsonl.journal" / "job.json").read_bytes())
    assert record["settings"]["defaults"] == {"max_tokens": 3, "n": 2}
    for other in ({}, {"defaults": {"max_tokens": 3}}):
        with pytest.raises(ValueError, match="was begun with other settings"):
            job.run(**other)
    assert job.run(defaults={"max_tokens": 3, "n": 2}) == EXIT_OK
    lengths = {name: line["response"]["body"]["usage"]["completion_tokens"] for name, line in job.by_id().items()}
    assert lengths["c"] == 3 + 2 and lengths["d"] == 2 + 1 and lengths["a"] == 4 + 3  # its own where it has one
    assert job.output.read_bytes() != plain


def test_a_job_goes_on_with_other_defaults_of_what_changes_no_answer(tmp_path):
    job = Job(tmp_path)
    whole = job.whole()
    record = tmp_path / "out.jsonl.journal" / "job.json"
    for defaults in ({"speculative": False}, {}, {"speculative": True}):
        assert job.run_to_step(1, defaults=defaults) == EXIT_PREEMPTED
        assert "defaults" not in object_in(record.read_bytes())["settings"]
    undrafted = [
        row | {"body": row["body"] | {"speculative": False}} if "body" in row else row | {"speculative": False}
        for row in ROWS
    ]
    job.input.write_bytes(json_lines(undrafted))  # rows too may change it
    assert job.run() == EXIT_OK and job.output.read_bytes() == whole


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


def test_files_that_do_not_fit_are_refused_before_the_model_loads(tmp_path):
    job = Job(tmp_path)
    read_only = tmp_path / "folder"
    read_only.mkdir()
    for source, target, error, said in (
        (job.input, read_only, ValueError, "is not a file"),
        (job.input, read_only / "missing" / "out", ValueError, "missing, where the output belongs, is not a folder"),
        (tmp_path / "missing.jsonl", job.output, OSError, "No such file"),
        (job.input, job.input, ValueError, "input and output are both"),
    ):
        with pytest.raises(error, match=said):
            run_batch(FakeLLM, source, target, model="tiny", console=Console(quiet=True))
    with pytest.raises(ValueError, match="nowhere"):
        job.run(page_path="nowhere://bucket/report.html")
    assert not job.output.exists() and not job.llms and job.input.read_bytes() == GOOD_INPUT


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.report.json", "page.html", "out.jsonl.journal"])
def test_what_stands_where_the_job_is_to_write_is_refused_before_the_model_loads(tmp_path, name):
    job = Job(tmp_path)
    place = tmp_path / name
    place.write_bytes(b"x") if name.endswith(".journal") else place.mkdir()
    with pytest.raises(ValueError, match=f"{re.escape(str(place))}.* is not a f"):
        job.run(page_path=str(tmp_path / "page.html"))
    assert not job.llms and {path.name for path in tmp_path.iterdir()} == {"in.jsonl", name}


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    job, place = Job(tmp_path), tmp_path / "elsewhere"
    expected = job.whole()
    place.mkdir()
    (place / "journal").mkdir()
    kept = {
        "out.jsonl": place / "mine.jsonl",
        "out.jsonl.journal": place / "journal",
        "out.jsonl.report.json": place / "r",
    }
    for name, target in kept.items():
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(target)
    assert job.run_to_step(2) == EXIT_PREEMPTED and job.run() == EXIT_OK
    assert all((tmp_path / name).is_symlink() for name in kept)
    assert (place / "mine.jsonl").read_bytes() == expected and (place / "journal" / "job.json").exists()
    assert job.run(new_run=True) == EXIT_OK
    assert (tmp_path / "old-1.out.jsonl").read_bytes() == (place / "mine.jsonl").read_bytes() == expected


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.journal"])
def test_a_link_that_leads_nowhere_is_refused_before_the_model_loads(tmp_path, name):
    job = Job(tmp_path)
    (tmp_path / name).symlink_to(tmp_path / "gone" / "there" if name == "out.jsonl" else tmp_path / "gone")
    with pytest.raises(ValueError, match=r"gone, .*(is not a folder; make it|which is not there; make that)"):
        job.run()
    assert not job.llms and not (tmp_path / "gone").exists()


@pytest.mark.parametrize("kind", ["fifo", "link", "dangling link", "text", "page of another"])
def test_a_report_page_replaces_nothing_but_a_report_page(tmp_path, kind):
    job, place, other = Job(tmp_path), tmp_path / "page.html", tmp_path / "mine.txt"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind.endswith("link"):
        place.symlink_to(other)
        if kind == "link":
            other.write_text("mine")
    else:
        place.write_text("mine" if kind == "text" else "<!doctype html><title>Batch job </title>")
    before = place.lstat()
    said = "replace it; move it away" if kind in ("text", "page of another") else "is not a file; move it away"
    for path in (str(place), f"file://{place}"):
        with pytest.raises(ValueError, match=f"{re.escape(path)}.*{said}, or name another place with --report"):
            job.run(page_path=path)
    assert place.lstat() == before and not job.llms and not job.output.exists()


def test_a_report_page_replaces_an_earlier_one_and_an_empty_file(tmp_path):
    job, place = Job(tmp_path), tmp_path / "page.html"
    place.touch()
    for _ in range(2):
        assert job.run(page_path=str(place)) == EXIT_OK
        assert "Batch job" in place.read_text()
        place.write_text(place.read_text().replace("complete", "stopped"))
    assert job.run(page_path=str(place)) == EXIT_OK and "complete" in place.read_text()


def test_rows_of_a_journal_whose_record_was_deleted_are_not_those_of_another_job(tmp_path):
    job = Job(tmp_path)
    notice = Notice()

    def on_step(llm: FakeLLM) -> None:
        if llm.num_steps == 3:
            shutil.rmtree(f"{job.output}.journal")
        elif llm.num_steps == 6:
            notice.give("the test", EXIT_PREEMPTED)

    assert job.run(notice=notice, on_step=on_step) == EXIT_PREEMPTED
    assert list(Path(f"{job.output}.journal/segments").iterdir())
    for new_run in (False, True):
        with pytest.raises(
            ValueError, match=r"has rows of a job and not that job's record, job\.json.* move the folder"
        ):
            job.run(seed=7, new_run=new_run)
    shutil.rmtree(f"{job.output}.journal")
    Path(f"{job.output}.report.json").unlink(missing_ok=True)
    assert job.run(seed=7) == EXIT_OK


@pytest.mark.parametrize("step", [3, None])
def test_a_worker_that_slept_while_others_began_the_job_and_went_on_joins_it(tmp_path, step):
    (tmp_path / "alone").mkdir()
    job, alone = Job(tmp_path), Job(tmp_path / "alone")
    next(alone.clock)  # it begins when the second worker does
    looked = []

    class Sleepy(LocalStore):
        def read(self, name: str, *args) -> bytes | None:
            found = super().read(name, *args)
            if name == "job.json":
                looked.append(found)
            if looked == [None, None]:  # it is about to begin the job itself
                looked.append(b"slept")
                assert job.run_to_step(step) == EXIT_PREEMPTED if step else job.run() == EXIT_OK
            return found

    assert job.run(store=lambda path: Sleepy(Path(path))) == alone.run()
    assert job.output.read_bytes() == alone.output.read_bytes()


def test_an_output_without_its_journal_is_refused_and_left_as_it_was(tmp_path):
    job = Job(tmp_path)
    job.output.write_bytes(b"my thesis")
    with pytest.raises(ValueError, match=r"is there without its journal, .*out.jsonl.journal"):
        job.run()
    assert job.output.read_bytes() == b"my thesis"


def test_a_store_that_makes_a_file_twice_is_refused_before_the_model_loads(tmp_path):
    class Overwriting(MemoryFileSystem):
        cachable = False

        def pipe_file(self, path, value, mode="overwrite", **kwargs):
            super().pipe_file(path, value, **kwargs)

    job, console = Job(tmp_path), Console(quiet=True)
    target, stores = f"memory://{tmp_path}/out.jsonl", JobOptions(open_store=lambda path: UrlStore(Overwriting(), path))
    with pytest.raises(ValueError, match=r"memory://.*out.jsonl is on a store that has no conditional writes"):
        run_batch(pytest.fail, job.input, target, model="tiny", console=console, options=stores)


def test_an_output_that_was_lost_is_merged_again_without_the_model(tmp_path):
    job = Job(tmp_path)
    job.run()
    before = job.output.read_bytes()
    job.output.unlink()
    assert job.run() == EXIT_OK
    assert job.output.read_bytes() == before and len(job.llms) == 1


def shown_words(job: Job) -> str:
    return " ".join(job.shown.getvalue().split())


def test_a_worker_taken_for_dead_while_it_merges_says_so_and_harms_nothing(tmp_path):
    job = Job(tmp_path)

    class Overtaken(LocalStore):
        @contextlib.contextmanager
        def writing(self, name):
            with super().writing(name) as file:
                yield file
                for beat in Path(f"{job.output}.journal/workers").glob("*.beat"):
                    beat.with_suffix(".dead").touch()
                assert job.run() == EXIT_OK

    assert job.run(store=lambda path: Overtaken(Path(path))) == EXIT_PREEMPTED
    assert "another took over its rows. Finished rows are kept; the same command" in shown_words(job)
    assert job.run() == EXIT_OK and [line["custom_id"] for line in job.lines()] == ["a", "b", "c", "d", "e"]


class Failing(LocalStore):
    """Fails from the `left`-th write on, with this error; a segment may be torn before it is refused."""

    def __init__(self, root: Path, left: list[int], failed: set[str], error: int, torn: bool) -> None:
        super().__init__(root)
        self.left, self.failed, self.error, self.torn = left, failed, error, torn

    def create(self, name: str, content: bytes, *, lasts: bool = True) -> bool:
        try:
            self._count(name)
        except OSError:
            if self.torn and name.startswith("segments/"):
                super().create(name, content[: len(content) // 2])
            raise
        return super().create(name, content, lasts=lasts)

    def replace(self, name: str, content: bytes, *, lasts: bool = True) -> None:
        self._count(name)
        super().replace(name, content, lasts=lasts)

    def _count(self, name: str) -> None:
        self.left[0] -= 1
        if self.left[0] < 0:
            self.failed.add(name.split("/")[0])
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(("error", "torn"), [(errno.ENOSPC, True), (errno.ENOSPC, False), (errno.EROFS, False)])
def test_a_full_or_read_only_disk_is_a_clear_error_and_loses_nothing(tmp_path, error, torn):
    job = Job(tmp_path)
    expected = job.whole()
    failed: set[str] = set()
    for writes in range(100):
        left = [writes]
        try:
            if job.run(store=lambda path, left=left: Failing(Path(path), left, failed, error, torn)) == EXIT_OK:
                break
        except OSError as found:
            assert found.errno == error
        for file in Path(f"{job.output}.journal/workers").glob("*"):  # as if the process had ended, as it would have
            file.unlink()
        job.clock = itertools.count(1_000)
        assert job.run() == EXIT_OK and job.output.read_bytes() == expected
        job.forget()
    places = {
        "job.json",
        "model.json",
        "environments",
        "workers",
        "layouts",
        "leases",
        "segments",
        "runs",
        "merged.json",
    }
    places |= {"paces"}  # which says less than the journal: that it was not written stops nothing
    assert failed == places | {"out.jsonl.report.json"}


@pytest.mark.parametrize("call", ["fsync", "link", "replace"])
def test_a_full_disk_names_the_file_and_leaves_nothing_beside_it(tmp_path, monkeypatch, call):
    job = Job(tmp_path)
    expected = job.whole()
    real, named = getattr(os, call), set[str]()

    def fails(left: list[int], *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *(arguments[:1] if call != "fsync" else ()))
        return real(*arguments)

    for calls in range(100):
        job.forget()
        monkeypatch.setattr(os, call, functools.partial(fails, [calls]))
        try:
            is_done = job.run() == EXIT_OK
        except OSError as found:
            is_done = False
            assert found.errno == errno.ENOSPC
            named.add(str(Path(found.filename).relative_to(tmp_path)).removeprefix("out.jsonl.").split("/")[-1])
        monkeypatch.undo()
        assert not list(tmp_path.rglob(".*"))
        for file in Path(f"{job.output}.journal/workers").glob("*"):  # as if the process had ended, as it would have
            file.unlink()
        job.clock = itertools.count(1_000)
        assert job.run() == EXIT_OK and job.output.read_bytes() == expected
        if is_done:
            break
    assert is_done and ({"job.json", "model.json"} if call != "replace" else {"out.jsonl", "merged.json"}) <= named


def test_an_input_that_changes_while_the_job_runs_is_an_error_and_the_rest_goes_on(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()

    def on_step(llm: FakeLLM) -> None:
        job.input.write_bytes(GOOD_INPUT.replace(b"class", b"CLASS").replace(b"def f", b"DEF F"))

    with pytest.raises(OSError, match="of the input changed while the job ran; start the job again"):
        job.run(on_step=on_step, width=1)
    job.input.write_bytes(GOOD_INPUT)
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected


def test_a_second_interrupt_during_journaling_ends_with_130_and_loses_nothing(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()
    num_signals = 0

    def interrupt() -> None:
        nonlocal num_signals
        num_signals += 1
        signal.raise_signal(signal.SIGINT)

    class Interrupted(LocalStore):
        def create(self, name, content, *, lasts=True):
            if name.startswith("segments/") and num_signals == 1:
                interrupt()
            return super().create(name, content, lasts=lasts)

    def on_step(llm: FakeLLM) -> None:
        if llm.num_steps == 3:
            interrupt()

    assert job.run(store=lambda path: Interrupted(Path(path)), on_step=on_step) == EXIT_INTERRUPTED
    assert num_signals == 2
    kept = b"".join(path.read_bytes() for path in Path(f"{job.output}.journal/segments").iterdir())
    assert b" ok " in kept and b" partial " in kept
    job.clock = itertools.count(1_000)
    assert job.run() == EXIT_OK and job.output.read_bytes() == expected


def test_the_summary_counts_rows_and_tokens(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run()
    cells = {}
    for line in job.shown.getvalue().splitlines():
        parts = [part.strip() for part in line.split("\u2502") if part.strip()]
        if len(parts) == 2:
            cells[parts[0]] = parts[1]
    assert cells["rows ok"] == "5" and cells["rows failed"] == "1" and cells["rows left"] == "0"
    usages = [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert cells["tokens in"] == str(sum(usage["prompt_tokens"] for usage in usages))
    assert cells["tokens out"] == str(sum(usage["completion_tokens"] for usage in usages))


def test_a_terminal_gets_a_bar_with_rates(tmp_path):
    job = Job(tmp_path)
    shown = io.StringIO()
    console = Console(file=shown, width=140, force_terminal=True)
    assert run_batch(FakeLLM, job.input, job.output, model="tiny", console=console) == EXIT_OK
    assert "5/5" in shown.getvalue() and "tok/s" in shown.getvalue() and "reused" in shown.getvalue()


def test_the_report_has_every_run_and_the_page_needs_nothing_beside_it(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run_to_step(3)
    assert job.run() == EXIT_ROWS_FAILED
    report = job.report()
    assert report["rows"] == {"all": 6, "ok": 5, "failed": 1, "invalid": 1, "unrecorded": 0}
    assert report["created"] == 1_000
    assert sorted(run["ended"] for run in report["runs"]) == ["all done", "the test"]
    usages = [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert report["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert 0 < report["cached_tokens"] < report["prompt_tokens"] and b"cached" not in job.output.read_bytes()
    values = [[t, t * 3, t * 90, t * 40, t * 50, 0.5, 0.25, t * 90, t * 50] for t in range(300)]
    for run in report["runs"]:
        run["samples"]["values"] = values
    for place in (str(tmp_path / "report.html"), f"memory://{tmp_path}/report.html"):
        assert job.run(page_path=place) == EXIT_ROWS_FAILED
        folder, name = split(place)
        assert f"Batch job {job.output}".encode() in open_store(folder).read(name)
    shown = page(report)
    assert shown.count("<svg") == 4 and shown.count("<polyline") == 7 and "<script" not in shown
    assert "http" not in shown and f"Batch job {job.output}" in shown and 'content="width=device-width' in shown
    hits = shown.split("Prompt tokens from the prefix cache")[1].split("</figure>")[0]
    assert ",123.1" in hits and ">100</text>" in hits  # 44.4 % of the scale
    assert len(shown) < 40_000
    for run in report["runs"]:  # rows are durable, and so counted, at every fourth sample
        run["samples"]["values"] = [[t, t // 4 * 12, t * 300, 0, t * 30, 0.5, 0.25, 0, 0] for t in range(100)]
    assert ">100</text>" in page({**report, "runs": report["runs"][:1]}).split("Tokens a row")[1]


def test_rows_of_all_runs_add_up_however_the_job_was_stopped(tmp_path):
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])
    job.run_to_step(3)
    job.run(limit=5)  # rows fail here, too
    report = job.report()
    rows, (first, second) = report["rows"], report["runs"]
    assert rows["all"] == rows["ok"] + rows["failed"] == 6 and rows["failed"] > rows["invalid"] == 1
    assert 0 < first["rows"] < 5 and first["rows"] + second["rows"] == 5 and rows["unrecorded"] == 0
    for run, last in ((run, run["samples"]["values"][-1]) for run in report["runs"]):
        assert last[1] <= run["rows"]
    Path(f"{job.output}.journal/runs/{first['worker']}.json").unlink()  # as if it had been killed
    job.run()
    report = job.report()
    assert report["rows"] == {**rows, "unrecorded": first["rows"]}
    shown = page(report)
    tokens = [first["prompt_tokens"], "", first["output_tokens"]]
    cells = "".join(f"<td>{each}</td>" for each in ("killed, no record", "", "", first["rows"], *tokens))
    assert cells in shown and report["output_tokens"] == first["output_tokens"] + second["output_tokens"]
    assert "<td>all</td><td></td><td></td><td>6</td>" in shown


class Killed(BaseException):
    """As SIGKILL: nothing is written any more."""


def test_the_report_of_a_job_that_was_killed_counts_the_tokens_of_all_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("ferrum_jax.batch.report.recorder._LEAST_KEPT_S", 0.0)
    job = Job(tmp_path, GOOD_INPUT + BAD_LINES[1])

    def killed(llm: FakeLLM) -> None:
        if llm.num_answered >= 2:
            raise Killed

    with pytest.raises(Killed):
        job.run(on_step=killed)
    assert job.run() == EXIT_ROWS_FAILED
    report, usages = job.report(), [line["response"]["body"]["usage"] for line in job.lines() if line["response"]]
    assert report["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert report["output_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    first, second = sorted(report["runs"], key=lambda run: run["ended"], reverse=True)
    assert first["ended"] == "killed, or still at work" and second["ended"] == "all done" and second["rows"] < 5
    assert report["wall_s"] == first["wall_s"] + second["wall_s"] and report["rows"]["ok"] == 5


def test_the_page_names_model_settings_and_errors_and_what_users_wrote_is_text_on_it(tmp_path):
    evil = "<script>alert('x')</script>&\"'"
    mine = [row for row in ROWS if "body" not in row]  # the others name their model
    rows = [*mine, {"custom_id": evil, "prompt": "much too long", "max_tokens": 30}]
    job = Job(tmp_path, json_lines(rows) + BAD_LINES[1])
    job.output = tmp_path / "<b>out.jsonl"
    job.run_to_step(2, model=evil)
    stopped = job.report()
    assert "stopped: the test; " in page(stopped) and stopped["errors"] == []
    assert job.run(model=evil, limit=8) == EXIT_ROWS_FAILED
    report = job.report()
    assert [error["code"] for error in report["errors"]] == ["invalid_json", "invalid_request"]
    report["identity"]["odd <i>"] = {"nested": "<u>"}
    report["environments"] = [{"mesh": "<mesh>"}, {"mesh": "tp=2"}]
    report["identity"]["long"] = "<u>" + "flag " * 50
    report["differing_bits"] = ["mesh '<mesh>' and 'tp=2'"]
    shown = page(report)
    assert html.escape(evil) in shown and "complete, 2 rows failed" in shown
    assert "the prompt has 13 tokens, more than 8" in shown and "line 6: " in shown
    for text in ("<script", "<b>o", "<i>", "<u>", "<mesh>"):
        assert text not in shown, text
    assert "Environment 2" in shown and "Bits may differ" in shown
    assert html.escape(report["identity"]["long"]) in shown


def test_the_page_counts_hidden_errors_and_plots_nothing_without_a_run(tmp_path):
    job = Job(tmp_path, BAD_LINES[1] * 30)
    assert job.run() == EXIT_ROWS_FAILED
    report = job.report()
    shown = page(report)
    assert len(report["errors"]) == 20 and "10 more; each has its line in the output of the complete job." in shown
    assert "<svg" not in shown and "too short for plots" in shown


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


def test_a_job_may_run_in_a_thread_of_its_own_and_is_told_by_its_notice(tmp_path):
    job = Job(tmp_path)
    expected = job.whole()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(job.run_to_step, 2).result() == EXIT_PREEMPTED
        assert thread.submit(job.run).result() == EXIT_OK
    assert job.output.read_bytes() == expected
