"""Named cases of gated_delta: tests, tuning and benchmarks run the same ones."""

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
    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    tile: int | None = None
    decode_only: bool = False
    sequential: bool = False
    dtype: str = "float32"


_MIXED = ((5, 1), (0, 2), (1, 1), (13, 20), (30, 0), (7, 11), (0, 1))
CASES = (
    Case(name="begins", rows=((0, 23),), num_tokens=32, num_rows=2, tile=8),
    Case(name="mixed", rows=_MIXED, num_tokens=40, num_rows=9, tile=8),
    Case(name="sequential", rows=_MIXED, num_tokens=40, num_rows=9, sequential=True),
    Case(name="long", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, num_key_heads=1, num_value_heads=1),
    Case(name="decode", rows=tuple((i, 1) for i in range(19)), num_tokens=20, num_rows=20, decode_only=True),
    Case(name="decode_some", rows=((3, 1), (8, 0), (0, 1)), num_tokens=4, num_rows=4, decode_only=True),
    Case(name="single", rows=((9, 1),), num_tokens=1, num_rows=1, num_value_heads=2, decode_only=True),
    Case(name="no_token", rows=(), num_tokens=8, num_rows=3),
    Case(name="bfloat16", rows=((4, 3), (0, 40), (6, 1)), num_tokens=64, num_rows=3, tile=16, dtype="bfloat16"),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v, log_decay, beta, pool, rows: random; q and k have length 1, as a layer normalises them.

    NaN fills padding tokens, slots that no row owns, and slots of rows that begin.
    """
    rng = np.random.default_rng(seed)
    T, K, N, A, B = case.num_tokens, case.num_key_heads, case.num_value_heads, case.key_dim, case.value_dim
    num_slots = len(case.rows) + 3
    slots = rng.permutation(np.arange(1, num_slots))[: len(case.rows)]
    pool = np.full((num_slots, N, A, B), np.nan)
    for slot, (start, _) in zip(slots, case.rows, strict=True):
        if start:
            pool[slot] = rng.standard_normal((N, A, B))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, T, K, A)))
    v = rng.standard_normal((T, N, B))
    log_decay, beta = -rng.exponential(0.3, (T, N)), rng.uniform(0, 1, (T, N))
    tokens = [q, k, v, log_decay, beta]
    for array in tokens:
        array[sum(count for _, count in case.rows) :] = np.nan
    dtypes = (case.dtype,) * 3 + ("float32",) * 3
    arrays = (jnp.asarray(array, dtype) for array, dtype in zip((*tokens, pool), dtypes, strict=True))
    rows: StateRows = make_rows(
        case.rows, case.num_rows, slots, decode_only=case.decode_only, sequential=case.sequential
    )
    return *arrays, rows
