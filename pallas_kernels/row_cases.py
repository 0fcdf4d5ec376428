"""Rows, slots and pools of random states for the named cases of ops over rows with states."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.on_device import on_device
from pallas_kernels.state_rows import StateRows

MIXED = ((5, 1), (0, 2), (1, 1), (13, 20), (30, 0), (7, 11), (0, 1))
PROMPT: dict[str, Any] = {"rows": ((64, 512),), "num_tokens": 512, "num_rows": 16, "decode_only": False}
DECODE = tuple((i, 1) for i in range(19))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCase:
    """rows: (start, count) of each; the rest of a bucket of num_tokens tokens and num_rows rows is padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    dtype: str = "float32"

    @property
    def num_real(self) -> int:
        """Tokens that are no padding."""
        return sum(count for _, count in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentCase(RowCase):
    """A case of a recurrence, whose tokens are taken by tiles of `tile`."""

    tile: int | None = None
    decode_only: bool = False
    sequential: bool = False


def make_rows(rows: tuple[tuple[int, int], ...], num_rows: int, slots: np.ndarray, **options: Any) -> StateRows:
    """StateRows of the (start, count) pairs at these slots, padded with absent rows to num_rows."""
    absent = num_rows - len(rows)
    starts, counts = np.array([*rows, *[(0, 0)] * absent], np.int32).reshape(-1, 2).T
    offsets = np.cumsum(counts) - counts
    where = np.pad(slots[: len(rows)], (0, absent))
    slots_, starts, counts, offsets = (on_device(x, np.int32) for x in (where, starts, counts, offsets))
    return StateRows(slots=slots_, starts=starts, counts=counts, offsets=offsets, **options)


def make_pool(case: RowCase, rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows' slots, and a pool [slots, *shape] of random states: NaN where no row owns it, or one begins."""
    num_slots = len(case.rows) + 3
    slots = rng.permutation(np.arange(1, num_slots))[: len(case.rows)]
    pool = np.full((num_slots, *shape), np.nan)
    for slot, (start, _) in zip(slots, case.rows, strict=True):
        if start:
            pool[slot] = rng.standard_normal(shape)
    return slots, pool


def recurrent_arguments(
    case: RecurrentCase, tokens: Sequence[np.ndarray], pool: np.ndarray, slots: np.ndarray
) -> tuple[Any, ...]:
    """tokens, pool, rows. The first three of the tokens' arrays have the case's dtype; padding tokens are NaN."""
    for array in tokens:
        array[case.num_real :] = np.nan
    dtypes = (case.dtype,) * 3 + ("float32",) * (len(tokens) - 2)
    arrays = (on_device(array, dtype) for array, dtype in zip((*tokens, pool), dtypes, strict=True))
    options = {"decode_only": case.decode_only, "sequential": case.sequential}
    return *arrays, make_rows(case.rows, case.num_rows, slots, **options)
