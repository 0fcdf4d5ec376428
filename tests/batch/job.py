"""A job over a fake engine in a folder of its own: its rows, its starts, and what is read of it."""

import dataclasses
import io
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ferrum_jax.batch.job import (
    EXIT_PREEMPTED,
    JobOptions,
    JobSettings,
    JobStart,
    run_batch,
)
from ferrum_jax.batch.notice import Notice
from ferrum_jax.io.files.store import LocalStore
from tests.batch.fake_llm import FakeLLM, json_lines
from tests.rows import rows_beside

ROWS = rows_beside(__file__)["rows"]


BAD_LINES = [
    b'{"custom_id": "a", "prompt": "again"}\n',
    b'{"custom_id": "torn", "prom\n',
    b'{"custom_id": "latin", "prompt": "\xe9"}\n',
    b'{"prompt": "nameless"}\n',
    b'{"custom_id": "typo", "prompt": "x", "temprature": 1}\n',
]


GOOD_INPUT = json_lines(ROWS)
ASKING = [{"custom_id": name, "prompt": "x", "model": name} for name in ("tiny", "gpt", "gpt2", "Org/Tiny")]


def at_step(step: int, call: Callable[[], object]) -> Callable[[FakeLLM], None]:
    """What a FakeLLM calls before each step, for this one."""
    return lambda llm: call() if llm.num_steps == step else None


def _taken(kind: type, how: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among `how`, which are taken out of it."""
    return {field.name: how.pop(field.name) for field in dataclasses.fields(kind) if field.name in how}


class Job:
    """A job in a folder of its own; each start is at another time of day and finishes rows in another order."""

    def __init__(self, folder: Path, content: bytes = GOOD_INPUT) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_bytes(content)
        self.llms: list[FakeLLM] = []
        self.clock = itertools.count(1_000)
        self.shown = io.StringIO()

    def run(
        self, *, model: str = "tiny", notice: Notice | None = None, llm: type[FakeLLM] = FakeLLM, **how: Any
    ) -> int:
        """The exit code of a start. how: fields of JobOptions and of JobSettings; the others are of the LLM."""
        options = {"poll_s": 0.01, "expiry_s": 5.0, "open_store": lambda path: LocalStore(Path(path))}
        options |= _taken(JobOptions, how)
        settings = JobSettings(now=lambda: next(self.clock), **_taken(JobSettings, how))

        def make(start: JobStart) -> FakeLLM:
            self.llms.append(llm(order=len(self.llms), **how))
            return self.llms[-1]

        return run_batch(
            make,
            self.input,
            self.output,
            model=model,
            settings=settings,
            options=JobOptions(**options),
            console=Console(file=self.shown, width=100),
            notice=notice,
        )

    def run_to_step(self, step: int, **kwargs) -> int:
        """A run that gets its notice at this step of the engine."""
        notice = Notice()
        return self.run(notice=notice, on_step=at_step(step, lambda: notice.give("the test", EXIT_PREEMPTED)), **kwargs)

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


def shown_words(job: Job) -> str:
    return " ".join(job.shown.getvalue().split())
