"""Times of calls on a device: the first one, which compiles, apart from the steady ones."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

_CALLS = 8  # of one sample, one after the other
_LONG_S = 0.05  # of one call, beside which its start is nothing: a sample has one
_FEWEST, _MOST_S = 4, 1.0  # samples, and seconds of them all where that leaves so many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call."""

    median_s: float
    p90_s: float


def measure(call: Callable[[], Any], *, samples: int = 20) -> Timing:
    """Times calls; a sample's calls are all started before its last result is waited for."""
    jax.block_until_ready(call())  # it may compile
    started = time.perf_counter()
    jax.block_until_ready(call())
    second = time.perf_counter() - started
    calls = 1 if second > _LONG_S else _CALLS
    found = []
    for _ in range(max(_FEWEST, min(samples, int(_MOST_S / (calls * second))))):
        started = time.perf_counter()
        results = [call() for _ in range(calls)]
        jax.block_until_ready(results[-1])
        found.append((time.perf_counter() - started) / calls)
    return Timing(median_s=statistics.median(found), p90_s=statistics.quantiles(found, n=10)[-1])
