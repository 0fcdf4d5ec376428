"""Threads of a server. None ends by an exception unseen: what it did is not done any more, and who depends on it hears.

Every thread of a server and of its engine is started here, but for those of pools whose results somebody awaits.
"""

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from ferrum_jax.io import system

Told = Callable[[str], None]  # of why a thread has ended


def start_thread(work: Callable[[], None], on_failure: Told, *, name: str) -> threading.Thread:
    """A thread that does the work, and calls `on_failure` if that ends by an exception."""
    thread = system.Thread(target=watched, args=(work, on_failure), name=name, daemon=True)
    thread.start()
    return thread


class WatchedPool:
    """One thread that does work in turn; what fails of it is told as by `start_thread`."""

    def __init__(self, on_failure: Told, *, name: str) -> None:
        self._threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._on_failure = on_failure

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.submit(watched, functools.partial(work, *arguments), self._on_failure)

    def close(self) -> None:
        """Work that has not begun never does."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def watch_all_threads(on_failure: Told) -> None:
    """Has `on_failure` hear of every thread of the process that ends by an exception, whoever started it."""
    threading.excepthook = lambda thrown: _tell(thrown.exc_value, on_failure)


def watched(work: Callable[[], None], on_failure: Told) -> None:
    """Does the work, and calls `on_failure` if that ends by an exception."""
    try:
        work()
    except BaseException as error:  # a panic of a library in Rust is no Exception
        _tell(error, on_failure)


def _tell(error: BaseException | None, on_failure: Told) -> None:
    logging.getLogger("ferrum_jax.serve").error("a thread of the server failed", exc_info=error)
    on_failure(f"a thread of the server failed: {type(error).__name__}: {error}")
