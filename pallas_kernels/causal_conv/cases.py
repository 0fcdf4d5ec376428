"""Named cases of causal_conv: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.on_device import on_device
from pallas_kernels.row_cases import RowCase, make_pool, make_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(RowCase):
    """width, taps: I and W."""

    width: int = 24
    taps: int = 4


CASES = (
    Case(name="begins", rows=((0, 9),), num_tokens=16, num_rows=2),
    Case(name="mixed", rows=((5, 1), (0, 2), (1, 1), (2, 2), (30, 0), (7, 11), (0, 1)), num_tokens=32, num_rows=9),
    Case(name="decode", rows=((4, 1), (1, 1), (0, 1)), num_tokens=4, num_rows=4),
    Case(name="single", rows=((9, 1),), num_tokens=1, num_rows=1),
    Case(name="two_taps", rows=((3, 4), (0, 5)), num_tokens=9, num_rows=2, taps=2),
    Case(name="no_token", rows=(), num_tokens=8, num_rows=3),
    Case(name="bfloat16", rows=((4, 3), (0, 6)), num_tokens=16, num_rows=3, dtype="bfloat16"),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """x, weight, pool, rows: random; slots that no row owns, and those of rows that begin, hold NaN."""
    rng = np.random.default_rng(seed)
    slots, pool = make_pool(case, rng, case.taps - 1, case.width)
    for slot, (start, _) in zip(slots, case.rows, strict=True):
        if start:
            pool[slot, : max(0, case.taps - 1 - start)] = 0
    x = rng.standard_normal((case.num_tokens, case.width))
    weight = rng.standard_normal((case.width, case.taps)) * case.taps**-0.5
    arrays = (on_device(array, case.dtype) for array in (x, weight, pool))
    return *arrays, make_rows(case.rows, case.num_rows, slots)
