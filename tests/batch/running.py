"""How tests run a job over the rows of a folder, and what they read of its journal."""

import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
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


def row_records(output: Path) -> Iterator[tuple[bytes, bytes]]:
    """The kind of each record of the output's journal, and the digest of its row."""
    for path in Path(f"{output}.journal/segments").glob("[!.]*"):
        for record in path.read_bytes().splitlines():
            _, kind, _, digest, _ = record.split(b" ", 4)
            yield kind, digest


def num_lines(output: Path) -> Counter[bytes]:
    """How many lines the journal has of each row that has ended, by the row's digest."""
    return Counter(digest for kind, digest in row_records(output) if kind in (b"ok", b"failed"))


def run_program(module: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON that a program of the tests prints last, and what it prints before; it ends with 0."""
    command = [sys.executable, "-W", "error", "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, _, found = done.stdout.rstrip().rpartition("\n")
    return json.loads(found), said
