"""Named cases of paged attention: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, as_bits, encode, pool_shape
from pallas_kernels.paged_attention.schedule import RaggedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """rows: (start, count) of each; the rest of a bucket of num_tokens tokens and num_rows rows is padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int
    num_rows: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    decode_only: bool = False
    invariant: bool = False
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    dtype: str = "float32"
    kv_dtype: str = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What paged_attention takes."""

    q: jax.Array  # [T, N, H]
    k: jax.Array  # [T, K, H]
    v: jax.Array  # [T, K, H]
    pool: KVPool  # with what came before the step
    batch: RaggedBatch
    sinks: jax.Array | None  # [N]


_MIXED = ((40, 1), (0, 1), (129, 1), (0, 70), (33, 5), (16, 48))
CASES = (
    Case(name="decode_gqa", rows=((5, 1), (130, 1), (63, 1), (64, 1)), num_tokens=4, num_rows=4, decode_only=True),
    Case(name="one_token_context", rows=((0, 1),), num_tokens=1, num_rows=1, decode_only=True),
    Case(name="mixed_mqa", rows=_MIXED, num_tokens=128, num_rows=8, num_kv_heads=1),
    Case(name="mixed_mha", rows=_MIXED, num_tokens=126, num_rows=6, num_kv_heads=4),
    Case(name="mixed_wide_heads", rows=_MIXED, num_tokens=128, num_rows=8, head_dim=256, block_size=8),
    Case(name="mixed_big_blocks", rows=_MIXED, num_tokens=128, num_rows=8, head_dim=64, block_size=64),
    Case(name="mixed_window", rows=_MIXED, num_tokens=128, num_rows=8, window=20),
    Case(name="mixed_window_sinks", rows=_MIXED, num_tokens=128, num_rows=8, window=64, has_sinks=True),
    Case(name="mixed_soft_cap", rows=_MIXED, num_tokens=128, num_rows=8, num_heads=16, soft_cap=2.0),
    Case(name="mixed_invariant", rows=_MIXED, num_tokens=128, num_rows=64, invariant=True),
    Case(name="mixed_invariant_window", rows=_MIXED, num_tokens=128, num_rows=64, invariant=True, window=20),
    Case(name="mixed_bfloat16", rows=_MIXED, num_tokens=128, num_rows=8, dtype="bfloat16", kv_dtype="bfloat16"),
    Case(name="mixed_int8", rows=_MIXED, num_tokens=128, num_rows=8, kv_dtype="int8"),
    Case(name="mixed_int8_window", rows=_MIXED, num_tokens=128, num_rows=8, kv_dtype="int8", window=20),
    Case(name="mixed_fp8_e4m3", rows=_MIXED, num_tokens=128, num_rows=8, kv_dtype="fp8_e4m3"),
    Case(name="mixed_fp8_e5m2", rows=_MIXED, num_tokens=128, num_rows=8, kv_dtype="fp8_e5m2"),
    Case(name="encoder", rows=((0, 1), (0, 70), (0, 48)), num_tokens=128, num_rows=8, causal=False),
    Case(name="encoder_chunks", rows=_MIXED, num_tokens=128, num_rows=8, causal=False),
)


def make_arguments(case: Case, seed: int = 0, implementation: str = "xla") -> Arguments:
    """Random queries, keys and values; everything in the pool that is not a row's earlier context is NaN.

    The null block first of all, and the places of the step's own tokens. In an int8 pool it is the scales.
    """
    rng = np.random.default_rng(seed)
    R, C, K, H = case.num_rows, case.block_size, case.num_kv_heads, case.head_dim
    starts, counts = np.zeros((2, R), np.int32)
    for r, (start, count) in enumerate(case.rows):
        starts[r], counts[r] = start, count
    contexts = np.where(counts > 0, starts + counts, 0)
    widths = -(-contexts // C)
    tables = np.zeros((R, max(1, widths.max())), np.int32)
    ids = 2 + rng.permutation(widths.sum())  # block 1 belongs to nobody
    context = np.full((widths.sum() + 2, C, 2 * K, H), np.nan, np.float32)
    for r, end in enumerate(np.cumsum(widths)):
        tables[r, : widths[r]] = ids[end - widths[r] : end]
        for position in range(_oldest(case, starts[r]), starts[r]):
            context[tables[r, position // C], position % C] = rng.standard_normal((2 * K, H))
        tables[r, : _oldest(case, starts[r]) // C] = 0  # blocks behind the window are released
    batch = RaggedBatch(
        block_tables=jnp.asarray(tables),
        starts=jnp.asarray(starts),
        counts=jnp.asarray(counts),
        query_offsets=jnp.asarray(np.cumsum(counts) - counts, jnp.int32),
    )
    sinks = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32) if case.has_sinks else None
    q = jnp.asarray(rng.standard_normal((case.num_tokens, case.num_heads, H)), case.dtype)
    k, v = jnp.asarray(rng.standard_normal((2, case.num_tokens, K, H)), case.dtype)
    pool = make_pool(context, KV_DTYPES[case.kv_dtype], implementation)
    return Arguments(q=q, k=k, v=v, pool=pool, batch=batch, sinks=sinks)


def make_pool(context: np.ndarray, dtype: jnp.dtype, implementation: str) -> KVPool:
    """The pool that holds context, [P, C, 2K, H] float32, in the form that the implementation reads."""
    P, C, pairs, H = context.shape
    shape = pool_shape(
        num_blocks=P,
        block_size=C,
        num_kv_heads=pairs // 2,
        head_dim=H,
        dtype=dtype,
        implementation=implementation,
    )
    values, scales = encode(jnp.asarray(context), dtype)
    if shape.is_packed:
        values = values.reshape(shape.values.shape)
    lanes = shape.values.shape[3] - values.shape[3]
    values = as_bits(jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, lanes))), shape)
    if scales is not None:
        scales = jnp.where(np.isnan(context).any(axis=-1), jnp.nan, scales).transpose(0, 2, 1)
    return dataclasses.replace(shape, values=values, scales=scales)


def _oldest(case: Case, start: int) -> int:
    return 0 if case.window is None else max(0, int(start) - case.window + 1)
