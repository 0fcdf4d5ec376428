"""Later: an executable that is there, or lies in bytes and is loaded when it is needed.

Loading takes as long as a few steps, and a first token needs few executables of many. So each is loaded by whoever
needs it first, or before that by a thread that goes through all of them while the engine works.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Executable = Callable[..., Any]


class Later:
    """One executable. load: makes it; called once, unless it was interrupted. Its error is everybody's who asks."""

    def __init__(self, load: Callable[[], Executable]) -> None:
        self._load: Callable[[], Executable] | None = load
        self._lock = threading.Lock()
        self._future: concurrent.futures.Future[Executable] = concurrent.futures.Future()

    @classmethod
    def made(cls, executable: Executable) -> Later:
        """One that is there."""
        later = cls(lambda: executable)
        later.prepare()
        return later

    @property
    def done(self) -> bool:
        return self._future.done()

    def prepare(self) -> None:
        """Loads it unless it is loaded; returns when it is. An error is raised to those who ask for the result."""
        with self._lock:
            if self._load is None:
                return
            try:
                self._future.set_result(self._load())
            except Exception as error:
                self._future.set_exception(error)
            self._load = None  # and the bytes with it

    def result(self) -> Executable:
        """The executable."""
        if not self._future.done():
            self.prepare()
        return self._future.result()


class Prepared(Mapping[Key, Executable]):
    """Executables by their keys; looking one up loads it if need be."""

    def __init__(self, laters: Mapping[Key, Later]) -> None:
        self._laters = laters

    def __getitem__(self, key: Key) -> Executable:
        return self._laters[key].result()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._laters)

    def __len__(self) -> int:
        return len(self._laters)

    @property
    def num_loaded(self) -> int:
        return sum(later.done for later in self._laters.values())


def load_behind(laters: Iterable[Later]) -> threading.Thread:
    """A thread that loads them in this order. When the program ends it ends too, after the one that it is at."""
    waiting = [later for later in laters if not later.done]

    def run() -> None:
        for later in waiting:
            if not threading.main_thread().is_alive():  # a daemon would be cut off inside the runtime, which crashes
                return
            later.prepare()

    thread = threading.Thread(target=run, name="load executables")
    thread.start()
    return thread
