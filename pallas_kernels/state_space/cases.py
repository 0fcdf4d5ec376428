"""Named cases of state_space: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.causal_conv.cases import make_rows
from pallas_kernels.state_rows import StateRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, count) of each; the rest of a bucket of num_tokens tokens and num_rows rows is padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    num_groups: int = 2
    num_heads: int = 4
    state_dim: int = 8
    head_dim: int = 12
    tile: int | None = None
    decode_only: bool = False
    sequential: bool = False
    dtype: str = "float32"


_MIXED = ((5, 1), (0, 2), (1, 1), (13, 20), (30, 0), (7, 11), (0, 1))
CASES = (
    Case(name="mixed", rows=_MIXED, num_tokens=40, num_rows=9, tile=8),
    Case(name="sequential", rows=_MIXED, num_tokens=40, num_rows=9, sequential=True),
    Case(name="long", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, num_groups=1, num_heads=3),
    Case(name="decode", rows=tuple((i, 1) for i in range(19)), num_tokens=20, num_rows=20, decode_only=True),
    Case(name="bfloat16", rows=((4, 3), (0, 40), (6, 1)), num_tokens=64, num_rows=3, tile=16, dtype="bfloat16"),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """c, b, v, log_decay, pool, rows: random. NaN fills padding tokens, slots that no row owns, and slots of rows that
    begin."""
    rng = np.random.default_rng(seed)
    T, K, N, A, B = case.num_tokens, case.num_groups, case.num_heads, case.state_dim, case.head_dim
    num_slots = len(case.rows) + 3
    slots = rng.permutation(np.arange(1, num_slots))[: len(case.rows)]
    pool = np.full((num_slots, N, B, A), np.nan)
    for slot, (start, _) in zip(slots, case.rows, strict=True):
        if start:
            pool[slot] = rng.standard_normal((N, B, A))
    c, b = rng.standard_normal((2, T, K, A)) * A**-0.5
    v, log_decay = rng.standard_normal((T, N, B)), -rng.exponential(0.3, (T, N))
    tokens = [c, b, v, log_decay]
    for array in tokens:
        array[sum(count for _, count in case.rows) :] = np.nan
    dtypes = (case.dtype,) * 3 + ("float32",) * 2
    arrays = (jnp.asarray(array, dtype) for array, dtype in zip((*tokens, pool), dtypes, strict=True))
    rows: StateRows = make_rows(
        case.rows, case.num_rows, slots, decode_only=case.decode_only, sequential=case.sequential
    )
    return *arrays, rows
