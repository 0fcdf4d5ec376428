"""A batch job's display: a bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ferrum_jax.core.outputs import EmbeddingOutput, RequestOutput, ScoreOutput
from ferrum_jax.core.progress import PLAIN_INTERVAL_S, RatedBar, clock
from ferrum_jax.io import system

_BAR_INTERVAL_S = 0.1


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of a job. Rows count the whole job, except num_own; tokens and seconds count this run only."""

    num_rows: int
    num_ok: int = 0
    num_failed: int = 0
    num_reused: int = 0  # of those that are ok, with the answer of an earlier job
    num_own: int = 0  # rows that this worker finished in this run, whatever became of them
    num_given: int = 0  # rows that it had and gave back to other workers
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0  # prompt tokens that came from the prefix cache
    num_output_tokens: int = 0
    num_reading: int = 0  # tokens that are computed of prompts of rows in progress
    num_written: int = 0  # tokens that this run has written, of rows in progress too
    pool_use: float = 0.0  # share of KV blocks that are held
    padding_waste: float = 0.0  # share of computed positions that were padding
    left_s: float | None = None  # expected until the end; None before it is known
    outlook: str = ""  # what is expected, in words
    cost: float | None = None  # of all workers and runs
    started_s: float = dataclasses.field(default_factory=lambda: system.monotonic())

    def count(self, outputs: Sequence[RequestOutput | EmbeddingOutput | ScoreOutput]) -> None:
        """Counts an answered row. outputs: one for each of its prompts."""
        self.num_ok += 1
        self.num_own += 1
        for output in outputs:
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_hit_tokens += output.num_cached_tokens
            if isinstance(output, RequestOutput):
                self.num_output_tokens += sum([len(choice.token_ids) for choice in output.outputs])

    @property
    def num_done(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def wall_s(self) -> float:
        return system.monotonic() - self.started_s

    @property
    def output_tokens_per_s(self) -> float:
        return max(self.num_output_tokens, self.num_written) / max(self.wall_s, 1e-9)

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.num_prompt_tokens + self.num_reading) / max(self.wall_s, 1e-9)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache."""
        return self.num_hit_tokens / max(self.num_prompt_tokens, 1)


class Display:
    """Shows a tally while rows finish; a context manager. Plain lines come at most every few seconds.

    The bar comes with the first update, so that it is not drawn over what a loading model shows.
    """

    def __init__(self, console: Console, tally: Tally) -> None:
        self.tally, self._console = tally, console
        self._bar = RatedBar(
            TextColumn("rows"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("gone,"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(
            "rows", start=False, total=tally.num_rows, completed=tally.num_done, left="-:--:--"
        )
        self._shown_s = system.monotonic()
        self._has_lines = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal or self._has_lines:
            self._show()  # so that what is seen last is how it ended
        self._bar.stop()

    def update(self) -> None:
        """Shows the tally, unless it was shown a moment ago."""
        interval_s = _BAR_INTERVAL_S if self._console.is_terminal else PLAIN_INTERVAL_S
        if system.monotonic() - self._shown_s < interval_s:
            return
        self._shown_s = system.monotonic()
        self._show()

    def say(self, text: str) -> None:
        """Prints the text as a line above the bar."""
        self._console.print(Text(text), soft_wrap=not self._console.is_terminal)

    def _show(self) -> None:
        tally = self.tally
        rates = (
            f"{tally.prompt_tokens_per_s:,.0f} tok/s in, {tally.output_tokens_per_s:,.0f} out, "
            f"{tally.hit_rate:.0%} reused, pool {tally.pool_use:.0%}, padding {tally.padding_waste:.0%}"
        )
        if self._console.is_terminal:
            if self._bar.tasks[0].start_time is None:
                self._bar.start_task(self._task)
                self._bar.tasks[0].start_time = tally.started_s  # the clock of the table at the end
            self._bar.rates = "\n".join(
                [f"{rates}{_given(tally)}", *tally.outlook.split("; ")]
            ).rstrip()  # a line has 80 columns
            left = "-:--:--" if tally.left_s is None else clock(tally.left_s)
            self._bar.update(self._task, completed=tally.num_done, left=left)
            self._bar.start()  # does nothing if it has started
        else:
            self._has_lines = True
            line = f"{tally.num_done}/{tally.num_rows} rows, {rates}, {self._left()}{_given(tally)}"
            line += f", {tally.outlook}" if tally.outlook and tally.num_done < tally.num_rows else ""
            self._console.print(line, highlight=False, soft_wrap=True)  # a log has lines of any width

    def _left(self) -> str:
        """How long the rest takes, or how long all of it took."""
        tally = self.tally
        if tally.num_done == tally.num_rows:
            return f"done in {clock(tally.wall_s)}"
        return "time left unknown" if tally.left_s is None else f"{clock(tally.left_s)} left"


def _given(tally: Tally) -> str:
    return f", {tally.num_given:,} given back" if tally.num_given else ""


def summary_table(tally: Tally, title: str) -> Table:
    """The result of a run."""
    table = Table(title=Text(title), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in (
        ("rows ok", f"{tally.num_ok:,}"),
        ("rows failed", f"{tally.num_failed:,}"),
        ("rows left", f"{tally.num_rows - tally.num_done:,}"),
        ("tokens in", f"{tally.num_prompt_tokens:,}"),
        ("of them reused", f"{tally.num_hit_tokens:,} ({tally.hit_rate:.1%})"),
        ("tokens out", f"{tally.num_output_tokens:,}"),
        ("padding of token slots", f"{tally.padding_waste:.1%}"),
        ("wall", f"{tally.wall_s:.1f} s"),
        ("output speed", f"{tally.output_tokens_per_s:,.1f} tok/s"),
    ):
        table.add_row(name, value)
    if tally.num_reused:
        table.add_row("rows with an earlier job's answer", f"{tally.num_reused:,}")
    if tally.num_given:
        table.add_row("rows of this worker", f"{tally.num_own:,}")
        table.add_row("given to other workers", f"{tally.num_given:,}")
    if tally.cost is not None:
        table.add_row("cost of all runs", f"{tally.cost:,.2f}")
    return table
