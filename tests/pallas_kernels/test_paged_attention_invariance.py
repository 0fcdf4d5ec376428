"""Invariant tiles: a token's attention has the same bits however its step was put together."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, KVPool
from pallas_kernels.kv_write.cases import make_pool
from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, make_schedule, paged_attention

C = 16
LENGTHS = (150, 67, 1)  # tokens of each sequence


@functools.partial(jax.jit, static_argnames=("window",))
def _attend(
    q: jax.Array, kv: jax.Array, pool: KVPool, batch: RaggedBatch, window: int | None
) -> tuple[jax.Array, KVPool]:
    T = q.shape[0]
    config = AttentionConfig.choose(num_tokens=T, block_size=C, decode_only=False, invariant=True)
    schedule = make_schedule(batch, num_tokens=T, block_size=C, config=config, window=window)
    return paged_attention(q, kv[:, 0::2], kv[:, 1::2], pool, schedule, scale=q.shape[2] ** -0.5)


class Sequences:
    """Random queries, keys and values of a few sequences, to be run in any composition of rows and bucket."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, kv_dtype: str) -> None:
        rng = np.random.default_rng(0)
        self.window, self.kv_dtype = window, kv_dtype
        self.q = [rng.standard_normal((n, num_heads, head_dim)).astype(np.float32) for n in LENGTHS]
        self.kv = [rng.standard_normal((n, 2 * num_kv_heads, head_dim)).astype(np.float32) for n in LENGTHS]

    def run(self, rows: list[tuple[int, int, int]], bucket: tuple[int, int, int], seed: int = 0) -> list[np.ndarray]:
        """Outputs of each (sequence, start, count), run together in a bucket (T, R, M) with blocks laid out by seed."""
        T, R, M = bucket
        ids = 1 + np.random.default_rng(seed).permutation(30).reshape(3, 10)
        context = np.full((31, C, *self.kv[0].shape[1:]), np.nan, np.float32)
        tables = np.zeros((R, M), np.int32)
        q, kv = (np.zeros((T, *a[0].shape[1:]), np.float32) for a in (self.q, self.kv))
        starts, counts, offsets = np.zeros((3, R), np.int32)
        token = 0
        for r, (sequence, start, count) in enumerate(rows):
            tables[r, :10] = ids[r]
            seen = np.arange(start)
            context[tables[r, seen // C], seen % C] = self.kv[sequence][:start]
            q[token : token + count] = self.q[sequence][start : start + count]
            kv[token : token + count] = self.kv[sequence][start : start + count]
            starts[r], counts[r], offsets[r] = start, count, token
            token += count
        batch = RaggedBatch(block_tables=tables, starts=starts, counts=counts, query_offsets=offsets)
        pool = make_pool(context, KV_DTYPES[self.kv_dtype], "xla")
        out = np.asarray(_attend(q, kv, pool, batch, self.window)[0])
        ends = np.cumsum([count for _, _, count in rows])
        return np.split(out[: ends[-1]], ends[:-1])


@pytest.mark.parametrize(
    ("heads", "window", "kv_dtype"),
    [
        pytest.param((4, 2, 16), None, "float32", marks=pytest.mark.slow),
        pytest.param((16, 8, 128), None, "float32", marks=pytest.mark.slow),
        ((8, 1, 32), 20, "float32"),
        ((4, 2, 16), None, "int8"),
    ],
)
def test_bits_are_the_same_for_every_chunking_companion_order_and_bucket(
    heads: tuple[int, int, int], window: int | None, kv_dtype: str
) -> None:
    sequences = Sequences(*heads, window, kv_dtype)
    whole = sequences.run([(0, 0, 150), (1, 0, 67), (2, 0, 1)], (256, 64, 10))
    reordered = sequences.run([(2, 0, 1), (1, 0, 67), (0, 0, 150)], (256, 64, 10), seed=1)
    for alone, other in zip(whole, reversed(reordered), strict=True):
        np.testing.assert_array_equal(alone, other)
    np.testing.assert_array_equal(sequences.run([(1, 0, 67)], (128, 128, 32))[0], whole[1])
    for chunk, bucket in ((63, (64, 64, 10)), (37, (128, 128, 32)), (7, (64, 64, 10))):
        starts = range(0, 150, chunk)
        parts = [sequences.run([(2, 0, 1), (0, s, min(chunk, 150 - s))], bucket, seed=s)[1] for s in starts]
        np.testing.assert_array_equal(np.concatenate(parts), whole[0])
    for position in (0, 15, 63, 64, 66):  # decode: one query, among others
        rows = [(0, 149, 1), (1, position, 1), (0, 20, 30)]
        np.testing.assert_array_equal(sequences.run(rows, (64, 64, 10))[1][0], whole[1][position])
