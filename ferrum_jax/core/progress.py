"""Progress of long work: bars and spinners on a terminal, plain lines from time to time elsewhere.

Programs call `LLM.generate` and `LLM.embed`, so their bars appear on terminals only. What is shown may hold text of
users (paths, ids, errors, prompts), so no console here reads markup.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ferrum_jax.core.outputs import RequestOutput, SequenceLogprobs, Transcription

PLAIN_INTERVAL_S = 5.0  # between two lines if there is no terminal


def plain_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """A console that shows text as it is: it reads neither [/INST] as markup nor :warning: as a picture.

    quiet: it shows nothing.
    """
    return Console(stderr=stderr, markup=False, emoji=False, quiet=quiet)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as in 0:05:12."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


@contextlib.contextmanager
def plain_lines(
    console: Console, say: Callable[[], str], *, interval_s: float = 3 * PLAIN_INTERVAL_S
) -> Iterator[None]:
    """Prints what `say` returns and the time gone, every `interval_s` of the block. Prints nothing on a terminal, where
    bars move by themselves."""
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
    """Shows `what` is being done, as a spinner on a terminal, else as lines; call the function to add how far it is."""
    said = what
    with console.status(Text(said)) as spinner, plain_lines(console, lambda: said):

        def update(how_far: str) -> None:
            nonlocal said
            said = f"{what}: {how_far}"
            spinner.update(Text(said))

        yield update


@contextlib.contextmanager
def progress_bar(
    total: int | None, *, shown: bool | None, what: str = "completions"
) -> Iterator[Callable[[Any], None]]:
    """A function to call with each answer. shown: None shows the bar where stderr is a terminal. what: they are."""
    tokens, reused, seconds = 0, 0, 0.0
    with _bar(what, total, shown) as advance:

        def count(answer: Any) -> None:
            nonlocal tokens, reused, seconds
            more = ""
            if isinstance(answer, RequestOutput):
                tokens += sum(len(choice.token_ids) for choice in answer.outputs)
                reused += answer.num_cached_tokens
                more = f", {reused:,} prompt tokens reused"
            elif isinstance(answer, Transcription):
                tokens, seconds = tokens + len(answer.token_ids), seconds + answer.duration_s
                more = f", {clock(seconds)} of sound"
            elif isinstance(answer, SequenceLogprobs):
                tokens += len(answer.token_ids)
            elif not isinstance(answer, ValueError):
                tokens += len(answer.prompt_token_ids)
            advance(tokens, more)

        yield count


class RatedBar(Progress):
    """A bar as wide as the terminal with rates in a line of their own beneath it: 80 columns have no room for both."""

    rates = ""

    def __init__(self, *columns: ProgressColumn, console: Console, disable: bool) -> None:
        super().__init__(*columns, console=console, disable=disable, expand=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.rates:
            yield Text(self.rates)


@contextlib.contextmanager
def _bar(what: str, total: int | None, shown: bool | None) -> Iterator[Callable[[int, str], None]]:
    """advance(tokens so far, more to say) after each of `total`."""
    console = plain_console(stderr=True)
    visible = console.is_terminal if shown is None else shown
    started_s = time.monotonic()
    columns = (TextColumn(what), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
    with RatedBar(*columns, console=console, disable=not visible) as bar:
        task = bar.add_task("", total=total)

        def advance(tokens: int, more: str) -> None:
            bar.rates = f"{tokens / (time.monotonic() - started_s):,.0f} tok/s{more}"
            bar.update(task, advance=1)

        yield advance
