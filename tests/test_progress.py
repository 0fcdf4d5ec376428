"""What long work says where there is no terminal."""

import io
import threading

import pytest
from rich.console import Console

from ferrum_jax.progress import clock, plain_lines, status


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
