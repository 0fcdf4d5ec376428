"""Where a long sound is cut: in as few windows as there can be, about equally long, each cut where it is quiet."""

from __future__ import annotations

import numpy as np

from ferrum_jax.io.ints import ceil_div

_LISTENED_S = 0.1  # a cut is in the middle of the quietest stretch of so long
_STEP_S = 0.02
_MOST_S, _SHARE = 2.0, 16  # how far a cut is moved at most, and what part of a window that is at most


def quiet_windows(waveform: np.ndarray, rate: int, most: int) -> list[np.ndarray]:
    """The windows of a waveform [samples], none longer than `most` samples, one after the other without a gap."""
    count, reach = num_quiet_windows(len(waveform), rate, most), _reach(rate, most)
    middles = [len(waveform) * number // count for number in range(1, count)]
    return np.split(waveform, [middle + _quietest(waveform, rate, middle, reach) for middle in middles])


def num_quiet_windows(num_samples: int, rate: int, most: int) -> int:
    """How many windows `quiet_windows` makes of so many samples."""
    return 1 if num_samples <= most else ceil_div(num_samples, most - 2 * _reach(rate, most))


def _reach(rate: int, most: int) -> int:
    """How far a cut is moved at most, in samples."""
    return min(int(_MOST_S * rate), most // _SHARE)


def _quietest(waveform: np.ndarray, rate: int, middle: int, reach: int) -> int:
    """How far from the middle it is quietest, in samples; the first of equals."""
    half, step = int(_LISTENED_S * rate) // 2, max(1, int(_STEP_S * rate))
    near = np.asarray(waveform[max(0, middle - reach - half) : middle + reach + half], np.float64)
    before = min(middle, reach + half)
    power = np.concatenate([[0.0], np.cumsum(near**2)])
    places = np.arange(max(-reach, half - before), min(reach, len(near) - before - half) + 1, step)
    if not len(places):
        return 0
    return int(places[np.argmin(power[before + places + half] - power[before + places - half])])
