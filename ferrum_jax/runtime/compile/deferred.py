"""DeferredExecutable: an executable that is loaded, or that is still bytes and is loaded when it is needed.

Loading takes as long as a few steps, and a first token needs only a few of many executables. So each is loaded by
whoever needs it first, or before that by a thread that loads all of them while the engine works.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Executable = Callable[..., Any]


class DeferredExecutable:
    """One executable. load: makes it; called once, or again if interrupted. Everybody who asks gets its error.

    compiles: making it is a compile, so that no step should wait for it; see `begin`.
    """

    def __init__(self, load: Callable[[], Executable], *, compiles: bool = False) -> None:
        self.compiles = compiles
        self._has_begun = False
        self._load: Callable[[], Executable] | None = load
        self._lock = threading.Lock()
        self._future: concurrent.futures.Future[Executable] = concurrent.futures.Future()

    @classmethod
    def made(cls, executable: Executable) -> DeferredExecutable:
        """One that is loaded already."""
        deferred = cls(lambda: executable)
        deferred.prepare()
        return deferred

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

    def begin(self) -> None:
        """Has a thread make it, if none does yet; never waits for that one, which holds the lock. The program ends
        after it."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=self.prepare, name="make an executable").start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when it is made or could not be, by whoever makes it, or when this time is over."""
        concurrent.futures.wait([self._future], timeout_s)

    def error(self) -> BaseException | None:
        """Why it could not be made; None if it could, or is not done."""
        return self._future.exception() if self._future.done() else None

    def result(self) -> Executable:
        """The executable."""
        if not self._future.done():
            self.prepare()
        return self._future.result()


class Prepared(Mapping[Key, Executable]):
    """Executables by their keys; looking one up loads it if need be. More may be put in while others read."""

    def __init__(self, deferred: Mapping[Key, DeferredExecutable]) -> None:
        self._deferred = dict(deferred)

    def put(self, key: Key, executable: DeferredExecutable) -> None:
        self._deferred[key] = executable

    def deferred(self, key: Key) -> DeferredExecutable:
        """One that need not be loaded."""
        return self._deferred[key]

    def __getitem__(self, key: Key) -> Executable:
        return self._deferred[key].result()

    def __contains__(self, key: object) -> bool:  # the one of Mapping would load it
        return key in self._deferred

    def __iter__(self) -> Iterator[Key]:
        return iter([*self._deferred])  # copied at once: what is put in meanwhile would end a walk with an error

    def __len__(self) -> int:
        return len(self._deferred)

    @property
    def num_loaded(self) -> int:
        return sum(executable.done for executable in [*self._deferred.values()])


def load_behind(deferred: Iterable[DeferredExecutable]) -> threading.Thread:
    """A thread that loads them in this order. When the program ends, it ends after the one that it is loading."""
    waiting = [executable for executable in deferred if not executable.done]

    def run() -> None:
        for executable in waiting:
            if not threading.main_thread().is_alive():  # a daemon would be cut off inside the runtime, which crashes
                return
            executable.prepare()

    thread = threading.Thread(target=run, name="load executables")
    thread.start()
    return thread
