"""A job answers each line of its input once, whatever interrupts it, and the file is that of an uninterrupted one."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ferrum_jax.batch.job import EXIT_INTERRUPTED, EXIT_OK, EXIT_ROWS_FAILED, run_batch
from tests.batch.fake_llm import FakeLLM

ROWS = [
    {"custom_id": "a", "prompt": "def f():", "max_tokens": 4},
    {"custom_id": "b", "prompt": "def g():", "max_tokens": 4, "temperature": 0.8, "n": 2, "logprobs": 0},
    {"custom_id": "c", "messages": [{"role": "user", "content": "hi"}]},
    {
        "custom_id": "d",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2},
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
GOOD_INPUT = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


class Job:
    """A job in a folder of its own; each start is at another time of day and finishes rows in another order."""

    def __init__(self, folder: Path, content: bytes = GOOD_INPUT) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_bytes(content)
        self.llms: list[FakeLLM] = []
        self.clock = itertools.count(1_000)
        self.shown = io.StringIO()

    def run(self, *, model: str = "tiny", seed: int = 0, settings: dict | None = None, **fake) -> int:
        def make() -> FakeLLM:
            self.llms.append(FakeLLM(order=len(self.llms), **fake))
            return self.llms[-1]

        console = Console(file=self.shown, width=100)
        return run_batch(
            make,
            self.input,
            self.output,
            model=model,
            seed=seed,
            settings=settings,
            console=console,
            now=lambda: next(self.clock),
        )

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]

    def by_id(self) -> dict[str, dict]:
        return {line["custom_id"]: line for line in self.lines()}


def test_every_line_of_input_is_answered_once(tmp_path):
    job = Job(tmp_path)
    assert job.run() == EXIT_OK
    assert sorted(line["custom_id"] for line in job.lines()) == ["a", "b", "c", "d", "e"]
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
    named = [line["custom_id"] for line in job.lines() if line["custom_id"] is not None]
    assert sorted(named) == ["a", "b", "c", "d", "e", "typo"]
    assert job.by_id()["a"]["response"]["status_code"] == 200


def test_of_three_rows_with_one_custom_id_the_first_is_answered(tmp_path):
    job = Job(tmp_path, GOOD_INPUT.splitlines(keepends=True)[0] * 3)
    assert job.run() == EXIT_ROWS_FAILED
    messages = [line["error"]["message"] for line in job.lines() if line["error"]]
    assert len(messages) == 2 and all("already that of line" in message for message in messages)
    assert job.by_id()["a"]["error"] is None
    before = job.output.read_bytes()
    assert job.run() == EXIT_ROWS_FAILED and job.output.read_bytes() == before


def test_a_row_that_the_engine_refuses_fails_alone(tmp_path):
    job = Job(tmp_path)
    assert job.run(limit=3) == EXIT_ROWS_FAILED
    found = job.by_id()
    assert found["d"]["error"] is None and found["c"]["error"] is None
    assert found["a"]["error"] == {"code": "invalid_request", "message": "the prompt has 8 tokens, more than 3"}


def test_a_finished_job_started_again_changes_nothing_and_loads_no_model(tmp_path):
    job = Job(tmp_path)
    job.run()
    before = job.output.read_bytes()
    assert job.run() == EXIT_OK
    assert job.output.read_bytes() == before and len(job.llms) == 1


def test_an_input_of_bad_lines_alone_or_an_empty_one_loads_no_model(tmp_path):
    job = Job(tmp_path, BAD_LINES[1])
    assert job.run() == EXIT_ROWS_FAILED
    job.output.unlink()
    job.input.write_bytes(b"\n")
    assert job.run() == EXIT_OK
    assert job.llms == [] and job.output.read_bytes() == b""


def test_killed_at_any_byte_of_the_last_two_lines_the_job_ends_with_the_same_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of starts: without what a kill does not need
    monkeypatch.setattr("ferrum_jax.batch.job.summary_table", lambda *_: "")
    too_long = {"custom_id": "long", "prompt": "x" * 30}
    job = Job(
        tmp_path, BAD_LINES[1] + b"".join(json.dumps(row).encode() + b"\n" for row in [ROWS[0], ROWS[4], too_long])
    )
    job.run(limit=20)
    whole = job.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for end in range(len(lines[0]) + len(lines[1]), len(whole) + 1):
        job.output.write_bytes(whole[:end])
        assert job.run(limit=20, width=1 + end % 3) == EXIT_ROWS_FAILED
        assert sorted(job.output.read_bytes().splitlines(keepends=True)) == sorted(lines), end


def test_killed_at_any_line_the_job_ends_with_the_same_lines(tmp_path):
    job = Job(tmp_path, BAD_LINES[1] + GOOD_INPUT)
    job.run()
    lines = job.output.read_bytes().splitlines(keepends=True)
    created = {line["response"]["body"]["created"] for line in job.lines() if line["response"]}
    assert created == {1_000}
    for count in range(2, len(lines)):  # the first line is an error and carries no start
        job.output.write_bytes(b"".join(lines[:count]))
        assert job.run() == EXIT_ROWS_FAILED
        assert sorted(job.output.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_two_jobs_in_other_orders_and_widths_write_the_same_lines(tmp_path):
    first, second = Job(tmp_path), Job(tmp_path)
    first.run(width=1)
    lines = sorted(first.output.read_bytes().splitlines())
    first.output.unlink()
    second.llms.extend(first.llms)
    second.run(width=5)
    assert sorted(second.output.read_bytes().splitlines()) == lines


def test_ctrl_c_keeps_finished_lines_and_exits_130_and_the_next_start_goes_on(tmp_path):
    job = Job(tmp_path)
    job.run()
    expected = sorted(job.output.read_bytes().splitlines())
    job.output.unlink()
    job.clock = itertools.count(1_000)
    for finished in range(1, 4):
        assert job.run(interrupt_after=1) == EXIT_INTERRUPTED
        assert len(job.lines()) == finished and job.llms[-1].is_closed
    assert "the same command goes on" in job.shown.getvalue()
    assert job.run() == EXIT_OK
    assert sorted(job.output.read_bytes().splitlines()) == expected


def test_ctrl_c_while_the_model_loads_exits_130(tmp_path):
    job = Job(tmp_path)

    def interrupted() -> FakeLLM:
        raise KeyboardInterrupt

    console = Console(file=io.StringIO())
    assert run_batch(interrupted, job.input, job.output, model="tiny", console=console) == EXIT_INTERRUPTED


_KILLED_JOB = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from ferrum_jax.batch import job
from tests.batch.fake_llm import FakeLLM

class Killed(FakeLLM):
    def _finish(self, running):
        if self.num_answered == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._finish(running)

job.run_batch(Killed, Path(sys.argv[1]), Path(sys.argv[2]), model="tiny", console=Console(), now=lambda: 1000.0)
"""


def test_a_job_killed_by_the_system_loses_no_finished_row_and_imports_no_jax(tmp_path):
    job = Job(tmp_path)
    job.run()
    expected = sorted(job.output.read_bytes().splitlines())
    job.output.unlink()
    script = _KILLED_JOB + "assert 'jax' not in sys.modules"
    command = [sys.executable, "-c", script, str(job.input), str(job.output)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(job.lines()) == 3
    assert job.run() == EXIT_OK
    assert sorted(job.output.read_bytes().splitlines()) == expected


def test_a_changed_row_is_refused_before_the_model_loads_and_nothing_is_written(tmp_path):
    job = Job(tmp_path)
    job.run()
    before = job.output.read_bytes()
    job.input.write_bytes(GOOD_INPUT.replace(b"def f", b"def h"))
    with pytest.raises(ValueError, match=r"other content of rows 'a' \(line 1\); give changed rows another custom_id"):
        job.run()
    assert job.output.read_bytes() == before and len(job.llms) == 1


def test_rows_may_be_added_but_not_taken_away(tmp_path):
    job = Job(tmp_path)
    job.run()
    job.input.write_bytes(b'{"custom_id": "f", "prompt": "new"}\n' + GOOD_INPUT)
    assert job.run() == EXIT_OK
    assert len(job.lines()) == 6 and job.llms[-1].num_pulled == 1
    job.input.write_bytes(GOOD_INPUT)
    with pytest.raises(ValueError, match="rows that are not in the input"):
        job.run()


@pytest.mark.parametrize("other", [{"model": "big"}, {"seed": 1}, {"settings": {"dtype": "bfloat16"}}])
def test_a_job_does_not_go_on_with_other_settings(tmp_path, other):
    job = Job(tmp_path)
    job.run(interrupt_after=2)
    with pytest.raises(ValueError, match="was begun with other settings"):
        job.run(**other)


def test_another_seed_draws_other_tokens_and_a_rows_own_seed_does_not_care(tmp_path):
    own = json.dumps({"custom_id": "own", "prompt": "x", "seed": 7}).encode() + b"\n"
    job = Job(tmp_path, GOOD_INPUT + own)
    job.run()
    first = job.by_id()
    job.output.unlink()
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
    with pytest.raises(ValueError, match="is not a file"):
        run_batch(FakeLLM, job.input, read_only, model="tiny", console=Console(quiet=True))
    with pytest.raises(OSError, match="No such file"):
        run_batch(FakeLLM, job.input, read_only / "missing" / "out.jsonl", model="tiny", console=Console(quiet=True))
    with pytest.raises(OSError, match="No such file"):
        run_batch(FakeLLM, tmp_path / "missing.jsonl", job.output, model="tiny", console=Console(quiet=True))
    assert not job.output.exists()
    with pytest.raises(ValueError, match="input and output are both"):
        run_batch(FakeLLM, job.input, job.input, model="tiny", console=Console(quiet=True))
    assert job.input.read_bytes() == GOOD_INPUT


def test_an_output_without_permission_to_write_is_refused_before_the_model_loads(tmp_path, monkeypatch):
    job = Job(tmp_path)
    real_open = open

    def refusing(path, mode="r", **kwargs):
        if Path(path) == job.output:
            raise PermissionError(13, os.strerror(13), str(path))
        return real_open(path, mode, **kwargs)

    monkeypatch.setattr("builtins.open", refusing)
    with pytest.raises(OSError, match="Permission denied"):
        job.run()
    assert job.llms == []


def test_a_full_disk_stops_the_job_and_the_next_start_goes_on(tmp_path, monkeypatch):
    job = Job(tmp_path)
    job.run()
    expected = sorted(job.output.read_bytes().splitlines())
    job.output.unlink()
    job.clock = itertools.count(1_000)
    from ferrum_jax.batch.journal import Journal

    def half(self, line):
        self._file.write(line[: len(line) // 2])
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", half)
        with pytest.raises(OSError, match="No space left"):
            job.run()
    assert job.run() == EXIT_OK
    assert sorted(line.replace(b": 1001", b": 1000") for line in job.output.read_bytes().splitlines()) == expected


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


def test_an_answer_that_cannot_be_written_aborts_what_runs(tmp_path, monkeypatch):
    job = Job(tmp_path)

    def full(*_) -> bytes:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ferrum_jax.batch.job.completed_line", full)
    with pytest.raises(OSError, match="No space left"):
        job.run()
    assert job.llms[0].is_closed and job.llms[0].num_answered == 1
