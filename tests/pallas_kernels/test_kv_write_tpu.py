"""kv_write for Mosaic TPU, interpreted, against NumPy; the runs that it finds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, KVPool
from pallas_kernels.kv_write import mosaic_tpu, oracle
from pallas_kernels.kv_write.cases import make_pool
from pallas_kernels.kv_write.runs import find_runs
from tests.fast_compile import FAST_COMPILE
from tests.pallas_kernels.tpu_interpreter import INTERPRET
from tests.rows import rows_beside

_write = jax.jit(functools.partial(mosaic_tpu.kv_write, interpret=INTERPRET), compiler_options=FAST_COMPILE)
_find_runs = jax.jit(find_runs, compiler_options=FAST_COMPILE)
_PLACES = np.array(  # 0: padding
    [(3, 14), (3, 15), (1, 0), (1, 1), (1, 2), (0, 0), (3, 0), (2, 7), (2, 6), (0, 0), (0, 0)], np.int32
)


def _pool(kv_dtype: str, num_kv_heads: int, head_dim: int, block_size: int = 16) -> KVPool:
    context = np.random.default_rng(1).standard_normal((4, block_size, 2 * num_kv_heads, head_dim)).astype(np.float32)
    return make_pool(context, KV_DTYPES[kv_dtype], "mosaic_tpu")


def _expected(pool: KVPool, k: np.ndarray, v: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    values, scales = np.array(pool.values), None if pool.scales is None else np.array(pool.scales)
    for t, (block, offset) in enumerate(places):
        pairs, units = oracle.encode(np.stack([k[t], v[t]], axis=1), pool.dtype)  # [K, 2, H], [K, 2]
        lanes = 0 if pool.is_packed else values.shape[3] - k.shape[2]
        values[block, offset] = np.pad(np.asarray(pairs), ((0, 0), (0, 0), (0, lanes))).reshape(values.shape[2:])
        if scales is not None:
            scales[block, :, offset] = np.asarray(units).reshape(-1)
    return values, scales


@pytest.mark.parametrize(
    ("kv_dtype", "num_kv_heads", "head_dim", "block_size"),
    rows_beside(__file__)["tokens are written where they belong and all else keeps its bits"],
)
def test_tokens_are_written_where_they_belong_and_all_else_keeps_its_bits(
    kv_dtype: str, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    pool = _pool(kv_dtype, num_kv_heads, head_dim, block_size)
    k, v = np.random.default_rng(0).standard_normal((2, len(_PLACES), num_kv_heads, head_dim)).astype(np.float32)
    got = _write(pool, k, v, _find_runs(*_PLACES.T))
    values, scales = _expected(pool, k, v, _PLACES)
    np.testing.assert_array_equal(np.asarray(got.values)[1:], values[1:])
    np.testing.assert_array_equal(np.asarray(got.values)[0], np.asarray(pool.values)[0])  # padding costs nothing
    if scales is not None:
        np.testing.assert_array_equal(np.asarray(got.scales)[1:], scales[1:])


def test_neighbours_that_go_to_neighbouring_places_are_one_run() -> None:
    runs = jax.tree.map(np.asarray, _find_runs(*_PLACES.T))
    n = int(runs.num_runs[0])
    found = [tuple(int(x[i]) for x in (runs.tokens, runs.blocks, runs.offsets, runs.lengths)) for i in range(n)]
    assert found == [(0, 3, 14, 2), (2, 1, 0, 3), (6, 3, 0, 1), (7, 2, 7, 1), (8, 2, 6, 1)]
    assert [int(runs.slots[i]) for i in range(n)] == [0, 1, 0, 3, 3]


def test_a_step_of_padding_writes_nothing() -> None:
    pool = _pool("bfloat16", 2, 128)
    zeros = np.zeros(4, np.int32)
    runs = _find_runs(zeros, zeros)
    assert int(np.asarray(runs.num_runs)[0]) == 0
    heads = np.ones((4, 2, 128), jnp.bfloat16)
    got = _write(pool, heads, heads, runs)
    assert dataclasses.asdict(got).keys() == dataclasses.asdict(pool).keys()
    np.testing.assert_array_equal(np.asarray(got.values), np.asarray(pool.values))
