"""What a person sees of long work: bars and spinners on a terminal, plain lines from time to time elsewhere.

Bars of `LLM.generate` and `LLM.embed`, which programs call, are for terminals only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ferrum_jax.request import RequestOutput

PLAIN_INTERVAL_S = 5.0  # between two lines where there is no terminal


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as in 0:05:12."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@contextlib.contextmanager
def plain_lines(
    console: Console, say: Callable[[], str], *, interval_s: float = 3 * PLAIN_INTERVAL_S
) -> Iterator[None]:
    """Where the console is no terminal, which has bars that move by themselves, prints what `say` returns and the
    time gone, while the work goes on. Work that is soon done says nothing."""
    if console.is_terminal:
        yield
        return
    started_s, over = time.monotonic(), threading.Event()

    def run() -> None:
        while not over.wait(interval_s):
            console.print(Text(f"{say()}, {clock(time.monotonic() - started_s)} gone"))

    thread = threading.Thread(target=run, name="plain lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def status(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, and how far it is once the function is told: a spinner on a terminal, else lines."""
    said = what
    with console.status(Text(said)) as spinner, plain_lines(console, lambda: said):

        def update(how_far: str) -> None:
            nonlocal said
            said = f"{what}: {how_far}"
            spinner.update(Text(said))

        yield update


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
