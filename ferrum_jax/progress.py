"""Bars for `LLM.generate` and `LLM.embed`: what is done, tokens a second, prompt tokens reused. Terminals only."""

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
    tokens, reused = 0, 0
    with _bar("completions", total, shown) as advance:

        def count(output: RequestOutput) -> None:
            nonlocal tokens, reused
            tokens += sum(len(choice.token_ids) for choice in output.outputs)
            reused += output.num_cached_tokens
            advance(tokens, f", {reused:,} prompt tokens reused")

        yield count


@contextlib.contextmanager
def texts_bar(total: int | None, *, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of tokens of each embedded text."""
    tokens = 0
    with _bar("texts", total, shown) as advance:

        def count(num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            advance(tokens, "")

        yield count


@contextlib.contextmanager
def _bar(what: str, total: int | None, shown: bool | None) -> Iterator[Callable[[int, str], None]]:
    """advance(tokens so far, more to say) after each of `total`."""
    console = Console(stderr=True)
    visible = console.is_terminal if shown is None else shown
    started_s = time.monotonic()
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not visible) as bar:
        task = bar.add_task("", total=total, rates="")

        def advance(tokens: int, more: str) -> None:
            bar.update(task, advance=1, rates=f"{tokens / (time.monotonic() - started_s):,.0f} tok/s{more}")

        yield advance
