"""What long work says where there is no terminal."""

import io
import re
import threading
import types
from typing import Any

import pytest
from rich.console import Console

from ferrum_jax.core.outputs import RequestOutput
from ferrum_jax.core.progress import clock, plain_console, plain_lines, progress_bar, status
from tests.support import ROOT


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_work_that_lasts_says_from_time_to_time_how_far_it_is(console):
    called = threading.Semaphore(0)

    def say():
        called.release()
        return "compiling: 3/15 [bold]"

    with plain_lines(console, say, interval_s=0.001):
        for _ in range(3):
            called.acquire()  # a second call comes after the line of the first
    assert console.file.getvalue().startswith("compiling: 3/15 [bold], 0:00:00 gone\ncompiling: 3/15")


def test_work_that_is_soon_done_says_nothing(console):
    with status(console, "loading [a]/model") as update:
        update("executables 3/15")
    assert console.file.getvalue().strip() == ""


def test_a_terminal_has_bars_and_no_lines():
    console = Console(file=io.StringIO(), force_terminal=True)
    before = threading.active_count()
    with plain_lines(console, lambda: "never", interval_s=0.001):
        assert threading.active_count() == before
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03")])
def test_times_are_read_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def test_every_console_of_the_package_is_one_that_reads_no_markup():
    made = [path.name for path in (ROOT / "ferrum_jax").rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    assert made == ["progress.py"]
    shown = plain_console()
    assert shown.render_str("[/INST] [red]x[/red] :warning:").plain == "[/INST] [red]x[/red] :warning:"


def test_at_80_columns_the_bar_of_generate_shows_counts_time_and_all_rates(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(
        "ferrum_jax.core.progress.Console", lambda **_: Console(file=shown, width=80, force_terminal=True)
    )
    choice: Any = types.SimpleNamespace(token_ids=range(10**6))
    output = RequestOutput(request_id=1, prompt=None, prompt_token_ids=(), outputs=(choice,), num_cached_tokens=10**6)
    with progress_bar(1_000_000, shown=True) as count:
        for _ in range(12):
            count(output)
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown.getvalue())
    assert re.search(r"completions .* 12/1000000 (-:--:--|\d+:\d\d:\d\d) left", text)
    assert re.search(r"\d tok/s, 12,000,000 prompt tokens reused", text) and "\u2026" not in text
