"""Sounds, each read in a thread while others run."""

import functools
import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from ferrum_jax.inputs.audio.sound_sources import is_array_with_rate

Key = TypeVar("Key", bound=Hashable)
Given = TypeVar("Given")
Read = TypeVar("Read")
READ_AHEAD = 2  # sounds; the features of an hour are 115 MB, and its waveform 230


def listed_sounds(given: Any) -> list[Any]:
    """One sound or many as a list of them. Raises ValueError for what is neither."""
    if isinstance(given, str | bytes | bytearray | memoryview | os.PathLike) or is_array_with_rate(given):
        return [given]
    if isinstance(given, np.ndarray) or not isinstance(given, Iterable):
        raise ValueError(
            f"sounds is a {type(given).__name__}; give bytes, a pathlib.Path, a URL, an array with its rate as in "
            "(samples, 16000), or a list of these"
        )
    return list(given)


class SoundsAhead(Generic[Key, Read]):
    """Sounds that are read in threads before they are needed, by key."""

    def __init__(self) -> None:
        self._ahead: dict[Key, Future[Read]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, key: Key, read: Callable[[], Read]) -> None:
        """Has it read in a thread, unless that was begun before."""
        if key not in self._ahead:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ferrum-sounds")
            self._ahead[key] = self._pool.submit(read)

    def take(self, key: Key) -> Future[Read]:
        """What was begun; it is forgotten here."""
        return self._ahead.pop(key)

    def close(self) -> None:
        """No more is read; nobody waits for what is being read."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def read_ahead(given: Iterable[Given], read: Callable[[Given], Read]) -> Iterator[tuple[Given, Future[Read]]]:
    """Each item with what `read` makes of it in a thread, in their order; the next READ_AHEAD are read meanwhile."""
    ahead: SoundsAhead[int, Read] = SoundsAhead()
    waiting: deque[tuple[int, Given]] = deque()
    try:
        for number, each in enumerate(given):
            ahead.begin(number, functools.partial(read, each))
            waiting.append((number, each))
            if len(waiting) > READ_AHEAD:
                number, each = waiting.popleft()
                yield each, ahead.take(number)
        yield from ((each, ahead.take(number)) for number, each in waiting)
    finally:
        ahead.close()
