"""A bar for `LLM.generate`: completions done, tokens a second, prompt tokens reused. Terminals only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ferrum_jax.request import RequestOutput


@contextlib.contextmanager
def progress_bar(total: int, *, shown: bool | None) -> Iterator[Callable[[RequestOutput], None]]:
    """A function to call with each finished output. shown: None shows the bar where stderr is a terminal."""
    console = Console(stderr=True)
    visible = console.is_terminal if shown is None else shown
    started_s, tokens, reused = time.monotonic(), 0, 0
    columns = (TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not visible) as bar:
        task = bar.add_task("", total=total, rates="")

        def advance(output: RequestOutput) -> None:
            nonlocal tokens, reused
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            reused += output.num_cached_tokens
            speed = tokens / (time.monotonic() - started_s)
            bar.update(task, advance=1, rates=f"{speed:,.0f} tok/s, {reused:,} prompt tokens reused")

        yield advance
