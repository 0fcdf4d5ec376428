"""Named cases of state_space: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.row_cases import DECODE, MIXED, PROMPT, RecurrentCase, make_pool, recurrent_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(RecurrentCase):
    """Sizes of the op's arrays."""

    num_groups: int = 2
    num_heads: int = 4
    state_dim: int = 8
    head_dim: int = 12


CASES = (
    Case(name="mixed", rows=MIXED, num_tokens=40, num_rows=9, tile=8),
    Case(name="sequential", rows=MIXED, num_tokens=40, num_rows=9, sequential=True),
    Case(name="long", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, num_groups=1, num_heads=3),
    Case(name="decode", rows=DECODE, num_tokens=20, num_rows=20, decode_only=True),
    Case(name="bfloat16", rows=((4, 3), (0, 40), (6, 1)), num_tokens=64, num_rows=3, tile=16, dtype="bfloat16"),
)

# What the TPU's kernel takes; then sizes of a model: Granite-4.0-H-Small's, on one device.
_FOR_TPU: dict[str, Any] = {"state_dim": 128, "head_dim": 16}
TPU_CASES = (
    Case(name="tpu_decode", rows=DECODE, num_tokens=20, num_rows=20, decode_only=True, **_FOR_TPU),
    Case(name="tpu_mixed", rows=MIXED, num_tokens=40, num_rows=9, tile=16, dtype="bfloat16", **_FOR_TPU),
    Case(name="tpu_halves", rows=MIXED, num_tokens=40, num_rows=9, tile=16, state_dim=128, head_dim=64),
    Case(name="tpu_tiles", rows=((70, 100), (3, 1), (0, 21), (5, 2)), num_tokens=128, num_rows=5, tile=32, **_FOR_TPU),
)
_REAL: dict[str, Any] = {
    "rows": ((9, 1),) * 64,
    "num_tokens": 64,
    "num_rows": 64,
    "decode_only": True,
    "dtype": "bfloat16",
}
_REAL |= {"num_groups": 1, "num_heads": 128, "state_dim": 128, "head_dim": 64}
REAL_TPU_CASES = (
    Case(name="mamba2_decode_64", **_REAL),
    Case(name="mamba2_prefill_512", **(_REAL | PROMPT)),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """c, b, v, log_decay, pool, rows: random. NaN fills padding tokens, slots that no row owns, and slots of rows that
    begin."""
    rng = np.random.default_rng(seed)
    T, K, N, A, B = case.num_tokens, case.num_groups, case.num_heads, case.state_dim, case.head_dim
    slots, pool = make_pool(case, rng, N, B, A)
    c, b = rng.standard_normal((2, T, K, A)) * A**-0.5
    v, log_decay = rng.standard_normal((T, N, B)), -rng.exponential(0.3, (T, N))
    return recurrent_arguments(case, [c, b, v, log_decay], pool, slots)
