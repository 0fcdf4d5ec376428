"""How tests run a job over the rows of a folder, and what they read of its journal."""

import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from ferrum_jax.batch.job import JobOptions, JobSettings, JobStart, run_batch
from ferrum_jax.batch.notice import Notice

ROOT = Path(__file__).parents[2]  # of tests.support, which imports jax


def run_rows(
    folder: Path,
    make: Callable[[JobStart], Any],
    output: str = "out.jsonl",
    *,
    notice: Notice | None = None,
    shown: io.StringIO | None = None,
    options: JobOptions | None = None,
    now: float = 1000.0,
    **settings: Any,
) -> int:
    """The exit code of a job over `folder`/in.jsonl, whose clock stands still. make: its LLM."""
    return run_batch(
        make,
        folder / "in.jsonl",
        folder / output,
        model="tiny",
        console=Console(file=shown or io.StringIO(), width=400),
        notice=notice,
        settings=JobSettings(now=lambda: now, **settings),
        options=options,
    )


def num_lines(output: Path) -> Counter[bytes]:
    """How many lines the journal of an output has of each row that has ended, by the row's digest."""
    paths = Path(f"{output}.journal/segments").glob("[!.]*")
    records = (record.split(b" ", 4) for path in paths for record in path.read_bytes().splitlines())
    return Counter(digest for _, kind, _, digest, _ in records if kind in (b"ok", b"failed"))
