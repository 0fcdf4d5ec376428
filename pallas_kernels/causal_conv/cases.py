"""Named cases of causal_conv: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.state_rows import StateRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, count) of each; the rest of a bucket of num_tokens tokens and num_rows rows is padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    width: int = 24
    taps: int = 4
    dtype: str = "float32"


CASES = (
    Case(name="begins", rows=((0, 9),), num_tokens=16, num_rows=2),
    Case(name="mixed", rows=((5, 1), (0, 2), (1, 1), (2, 2), (30, 0), (7, 11), (0, 1)), num_tokens=32, num_rows=9),
    Case(name="decode", rows=((4, 1), (1, 1), (0, 1)), num_tokens=4, num_rows=4),
    Case(name="single", rows=((9, 1),), num_tokens=1, num_rows=1),
    Case(name="two_taps", rows=((3, 4), (0, 5)), num_tokens=9, num_rows=2, taps=2),
    Case(name="no_token", rows=(), num_tokens=8, num_rows=3),
    Case(name="bfloat16", rows=((4, 3), (0, 6)), num_tokens=16, num_rows=3, dtype="bfloat16"),
)


def make_rows(rows: tuple[tuple[int, int], ...], num_rows: int, slots: np.ndarray, **options: bool) -> StateRows:
    """StateRows of the (start, count) pairs at these slots, padded with absent rows to num_rows."""
    absent = num_rows - len(rows)
    starts, counts = np.array([*rows, *[(0, 0)] * absent], np.int32).reshape(-1, 2).T
    offsets = np.cumsum(counts) - counts
    where = np.pad(slots[: len(rows)], (0, absent))
    slots_, starts, counts, offsets = (jnp.asarray(x, jnp.int32) for x in (where, starts, counts, offsets))
    return StateRows(slots=slots_, starts=starts, counts=counts, offsets=offsets, **options)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """x, weight, pool, rows: random; slots that no row owns, and those of rows that begin, hold NaN."""
    rng = np.random.default_rng(seed)
    num_slots = len(case.rows) + 3
    slots = rng.permutation(np.arange(1, num_slots))[: len(case.rows)]
    pool = np.full((num_slots, case.taps - 1, case.width), np.nan)
    for slot, (start, _) in zip(slots, case.rows, strict=True):
        if start:
            pool[slot] = rng.standard_normal(pool.shape[1:])
            pool[slot, : max(0, case.taps - 1 - start)] = 0
    x = rng.standard_normal((case.num_tokens, case.width))
    weight = rng.standard_normal((case.width, case.taps)) * case.taps**-0.5
    arrays = (jnp.asarray(array, case.dtype) for array in (x, weight, pool))
    return *arrays, make_rows(case.rows, case.num_rows, slots)
