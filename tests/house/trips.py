"""Rooms of a trip: the files of the product whose functions run while something is asked.

Counted by Python's own profile hook in all threads that begin after `counting`, so that two versions of the code are
counted alike.
"""

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

from tests.support import ROOT

PACKAGES = tuple(f"{ROOT / package}/" for package in ("ferrum_jax", "pallas_kernels", "checkpoints"))


class Trip:
    """Counts while `is_counting`. wants: whether the call of a frame counts; all do if it is None."""

    def __init__(self, wants: Callable[[FrameType], bool] | None = None) -> None:
        self.is_counting = False
        self._wants = wants
        self._codes: set[CodeType] = set()

    @property
    def rooms(self) -> set[str]:
        return {code.co_filename.removeprefix(f"{ROOT}/") for code in self._codes}

    @property
    def functions(self) -> set[tuple[str, str]]:
        return {(code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname) for code in self._codes}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the calls within, without those of finalizers of what other tests have left."""
        gc.collect()
        gc.disable()
        self.is_counting = True
        try:
            yield
        finally:
            self.is_counting = False
            gc.enable()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self.is_counting or event != "call" or code in self._codes:
            return
        if code.co_filename.startswith(PACKAGES) and (self._wants is None or self._wants(frame)):
            self._codes.add(code)


@contextlib.contextmanager
def counting(wants: Callable[[FrameType], bool] | None = None) -> Iterator[Trip]:
    """A trip that this thread and those begun within it are on."""
    trip, before, before_of_threads = Trip(wants), sys.getprofile(), threading.getprofile()
    threading.setprofile(trip)
    sys.setprofile(trip)
    try:
        yield trip
    finally:
        sys.setprofile(before)
        threading.setprofile(before_of_threads)
