"""Sounds, each read in a thread while others run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ferrum_jax.inputs.audio.sound_sources import is_array_with_rate

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


def read_ahead(given: Iterable[Given], read: Callable[[Given], Read]) -> Iterator[tuple[Given, Future[Read]]]:
    """Each item with what `read` makes of it in a thread, in their order; the next READ_AHEAD are read meanwhile."""
    ahead: deque[tuple[Given, Future[Read]]] = deque()
    pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ferrum-sounds")
    try:
        for each in given:
            ahead.append((each, pool.submit(read, each)))
            if len(ahead) > READ_AHEAD:
                yield ahead.popleft()
        yield from ahead
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
