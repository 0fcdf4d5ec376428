"""Named cases of gated_delta: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.row_cases import DECODE, MIXED, PROMPT, RecurrentCase, make_pool, recurrent_arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(RecurrentCase):
    """Sizes of the op's arrays. by_channel: log_decay is [T, N, A]. decay: its mean, without its sign."""

    num_key_heads: int = 2
    num_value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    by_channel: bool = False
    decay: float = 0.3


CASES = (
    Case(name="begins", rows=((0, 23),), num_tokens=32, num_rows=2, tile=8),
    Case(name="mixed", rows=MIXED, num_tokens=40, num_rows=9, tile=8),
    Case(name="sequential", rows=MIXED, num_tokens=40, num_rows=9, sequential=True),
    Case(name="long", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, num_key_heads=1, num_value_heads=1),
    Case(name="decode", rows=DECODE, num_tokens=20, num_rows=20, decode_only=True),
    Case(name="decode_some", rows=((3, 1), (8, 0), (0, 1)), num_tokens=4, num_rows=4, decode_only=True),
    Case(name="single", rows=((9, 1),), num_tokens=1, num_rows=1, num_value_heads=2, decode_only=True),
    Case(name="no_token", rows=(), num_tokens=8, num_rows=3),
    Case(name="channels", rows=MIXED, num_tokens=40, num_rows=9, tile=16, by_channel=True),
    Case(name="channels_sequential", rows=MIXED, num_tokens=40, num_rows=9, sequential=True, by_channel=True),
    Case(name="channels_long", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, by_channel=True, decay=0.01),
    Case(name="channels_strong", rows=((70, 100), (0, 80)), num_tokens=192, num_rows=4, by_channel=True, decay=5.0),
    Case(name="channels_odd_tile", rows=((3, 50),), num_tokens=64, num_rows=2, tile=21, by_channel=True, decay=40.0),
    Case(name="channels_decode", rows=DECODE, num_tokens=20, num_rows=20, decode_only=True, by_channel=True),
    Case(name="bfloat16", rows=((4, 3), (0, 40), (6, 1)), num_tokens=64, num_rows=3, tile=16, dtype="bfloat16"),
)

# What the TPU's kernel takes; then sizes of models: Qwen3-Next's and Kimi-Linear's, on one device.
_FOR_TPU: dict[str, Any] = {"key_dim": 16, "value_dim": 128}
TPU_CASES = (
    Case(name="tpu_decode", rows=DECODE, num_tokens=20, num_rows=20, decode_only=True, **_FOR_TPU),
    Case(name="tpu_some", rows=((3, 1), (8, 0), (0, 1)), num_tokens=4, num_rows=4, decode_only=True, **_FOR_TPU),
    Case(name="tpu_no_token", rows=(), num_tokens=16, num_rows=3, **_FOR_TPU),
    Case(name="tpu_mixed", rows=MIXED, num_tokens=40, num_rows=9, tile=16, dtype="bfloat16", **_FOR_TPU),
    Case(name="tpu_tiles", rows=((70, 100), (3, 1), (0, 21), (5, 2)), num_tokens=128, num_rows=5, tile=32, **_FOR_TPU),
    Case(name="tpu_channels", rows=MIXED, num_tokens=40, num_rows=9, tile=8, by_channel=True, **_FOR_TPU),
)
_REAL: dict[str, Any] = {
    "rows": ((9, 1),) * 64,
    "num_tokens": 64,
    "num_rows": 64,
    "decode_only": True,
    "num_value_heads": 32,
}
_REAL |= {"key_dim": 128, "value_dim": 128, "dtype": "bfloat16"}
REAL_TPU_CASES = (
    Case(name="gated_delta_decode_64", num_key_heads=16, **_REAL),
    Case(name="kda_decode_64", num_key_heads=32, by_channel=True, **_REAL),
    Case(name="gated_delta_prefill_512", num_key_heads=16, **(_REAL | PROMPT)),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[Any, ...]:
    """q, k, v, log_decay, beta, pool, rows: random; q and k have length 1, as a layer normalises them.

    NaN fills padding tokens, slots that no row owns, and slots of rows that begin.
    """
    rng = np.random.default_rng(seed)
    T, K, N, A, B = case.num_tokens, case.num_key_heads, case.num_value_heads, case.key_dim, case.value_dim
    slots, pool = make_pool(case, rng, N, A, B)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, T, K, A)))
    v = rng.standard_normal((T, N, B))
    decays = (T, N, A) if case.by_channel else (T, N)
    log_decay, beta = -rng.exponential(case.decay, decays), rng.uniform(0, 1, (T, N))
    return recurrent_arguments(case, [q, k, v, log_decay, beta], pool, slots)
