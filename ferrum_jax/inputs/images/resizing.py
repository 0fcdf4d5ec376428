"""Frames of a video at another size, to the byte as torchvision resizes them: bytes in, bytes out, antialiased.

Each output is a sum of a few inputs of its row, then of its column. Weights are whole numbers of 16 bits, with as many
bits behind the point as the largest of them leaves room for, and each pass rounds to a byte. Pillow's weights have 22
bits there, so its bytes differ by one now and then.
Source: the filters of Keys 1981 (cubic, a = -1/2) and a triangle, stretched where the image shrinks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
_MAX_BITS = 22
_ROWS = 64  # of a pass at once, so that its sums stay in a cache


def _triangle(x: float) -> float:
    return max(0.0, 1.0 - abs(x))


def _cubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


FILTERS: dict[int, tuple[Callable[[float], float], float]] = {BILINEAR: (_triangle, 1.0), BICUBIC: (_cubic, 2.0)}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Taps:
    """Which inputs each output is the sum of, and by what weights, whole numbers with `bits` behind the point."""

    places: np.ndarray  # [taps, outputs] int64
    weights: np.ndarray  # [taps, outputs] int32, 0 where an output has fewer
    bits: int


def resized_frame(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8 [height, width, 3] of uint8 [H, W, 3]."""
    rows, columns = pixels.shape[:2]
    if columns != width:  # across first: columns stand as rows, so that whole rows are read
        turned = np.ascontiguousarray(pixels.transpose(1, 0, 2)).reshape(columns, -1)
        across = _summed(turned, _taps(columns, width, resample)).reshape(width, rows, 3)
        pixels = np.ascontiguousarray(across.transpose(1, 0, 2))
    if rows != height:
        pixels = _summed(pixels.reshape(rows, -1), _taps(rows, height, resample)).reshape(height, width, 3)
    return pixels


def _summed(values: np.ndarray, taps: _Taps) -> np.ndarray:  # uint8 [inputs, n] -> uint8 [outputs, n]
    found = np.empty((taps.places.shape[1], values.shape[1]), np.uint8)
    for first in range(0, len(found), _ROWS):
        part = slice(first, first + _ROWS)
        total = np.full(found[part].shape, 1 << (taps.bits - 1), np.int32)
        for places, weights in zip(taps.places[:, part], taps.weights[:, part], strict=True):
            total += values[places] * weights[:, None]
        found[part] = np.clip(total >> taps.bits, 0, 255)
    return found


@functools.lru_cache(maxsize=32)
def _taps(inputs: int, outputs: int, resample: int) -> _Taps:
    curve, reach = FILTERS[resample]
    scale = inputs / outputs
    stretch = max(scale, 1.0)
    support = reach * stretch
    lists = []
    for output in range(outputs):
        centre = scale * (output + 0.5)
        first = max(int(centre - support + 0.5), 0)
        count = min(int(centre + support + 0.5), inputs) - first
        weights = [curve((j + first - centre + 0.5) * (1.0 / stretch)) for j in range(count)]
        total = sum(weights)
        lists.append((first, [weight / total if total else weight for weight in weights]))
    largest = max(max(weights) for _, weights in lists)
    bits = 0
    while bits < _MAX_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    taps = max(len(weights) for _, weights in lists)
    places, whole = np.zeros((taps, outputs), np.int64), np.zeros((taps, outputs), np.int32)
    for output, (first, weights) in enumerate(lists):
        places[: len(weights), output] = np.arange(first, first + len(weights))
        whole[: len(weights), output] = [math.trunc(w * (1 << bits) + math.copysign(0.5, w)) for w in weights]
    return _Taps(places=places, weights=whole, bits=bits)
