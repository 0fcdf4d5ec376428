"""The TPU prefill kernel, interpreted with race detection over memory of NaN, against its float64 oracle."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import tpu as kv_write
from pallas_kernels.paged_attention import RaggedBatch
from pallas_kernels.paged_attention.cases import Arguments, Case, make_arguments
from pallas_kernels.paged_attention.tpu_prefill import prefill_attention
from pallas_kernels.paged_attention.tpu_prefill_config import PrefillConfig, PrefillShape
from pallas_kernels.paged_attention.tpu_prefill_schedule import Tile, make_prefill_schedule
from tests.oracles import attention as oracle
from tests.oracles import kv_pool as kv_oracle
from tests.oracles.tolerance import TOLERANCE

_INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
_SMALL = PrefillConfig(tile_q=16, chunk_q=16, tile_kv=128, step_kv=128)
_F32 = {"dtype": "float32", "kv_dtype": "float32"}
_rows = functools.partial(Case, rows=((40, 2), (0, 1), (129, 9), (0, 21)), num_tokens=40, num_rows=6)
CASES = (
    (_rows(name="gqa"), _SMALL),
    (_rows(name="two_parts_two_steps", **_F32), PrefillConfig(tile_q=32, chunk_q=32, tile_kv=256, step_kv=128)),
    (
        _rows(name="two_chunks_h256_window", head_dim=256, num_kv_heads=1, window=20, **_F32),
        PrefillConfig(tile_q=32, chunk_q=16, tile_kv=128, step_kv=128),
    ),
    (_rows(name="h64_int8_sinks", head_dim=64, kv_dtype="int8", has_sinks=True), _SMALL),
    (_rows(name="fp8_soft_cap", kv_dtype="fp8_e4m3", block_size=32, soft_cap=2.0), _SMALL),
    (_rows(name="encoder_h96", causal=False, head_dim=96, num_kv_heads=4), _SMALL),
)


def _written(case: Case, arguments: Arguments):
    """The pool with the step's K and V."""
    blocks, offsets = np.zeros((2, case.num_tokens), np.int32)
    table, token = np.asarray(arguments.batch.block_tables), 0
    for r, (start, count) in enumerate(case.rows):
        positions = np.arange(start, start + count)
        blocks[token : token + count] = table[r, positions // case.block_size]
        offsets[token : token + count] = positions % case.block_size
        token += count
    runs = kv_write.find_runs(jnp.asarray(blocks), jnp.asarray(offsets))
    return kv_write.kv_write(arguments.pool, arguments.k, arguments.v, runs, interpret=_INTERPRET)


@pytest.mark.parametrize(("case", "config"), CASES, ids=lambda x: x.name if isinstance(x, Case) else "")
def test_rows_of_several_queries_equal_the_float64_oracle(case: Case, config: PrefillConfig) -> None:
    logical, a = make_arguments(case), make_arguments(case, implementation="mosaic_tpu")
    batch = logical.batch
    expected = oracle.paged_attention(
        *(np.asarray(x) for x in (logical.q, logical.k, logical.v)),
        *kv_oracle.arrays(logical.pool),
        *(np.asarray(x) for x in (batch.block_tables, batch.starts, batch.counts)),
        scale=case.softmax_scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if a.sinks is None else np.asarray(a.sinks),
        causal=case.causal,
    )
    pool = _written(case, a)
    schedule = make_prefill_schedule(
        batch, num_tokens=case.num_tokens, config=config, window=case.window, causal=case.causal
    )
    got = prefill_attention(
        a.q,
        pool.values,
        pool.scales,
        schedule,
        num_kv_heads=case.num_kv_heads,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        sinks=a.sinks,
        interpret=_INTERPRET,
    )
    assert got.dtype == a.q.dtype
    served = np.repeat([count > 1 for _, count in case.rows], [count for _, count in case.rows])
    real = len(served)
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64)[:real][served], expected[:real][served], **TOLERANCE[case.dtype]
    )


def _batch(rows: list[tuple[int, int]]) -> RaggedBatch:
    starts, counts = jnp.asarray(rows, jnp.int32).T
    return RaggedBatch(
        block_tables=jnp.zeros((len(rows), 32), jnp.int32),
        starts=starts,
        counts=counts,
        query_offsets=jnp.cumsum(counts) - counts,
    )


def test_tiles_cover_each_query_of_a_row_of_several_once_and_see_no_more_than_they_may() -> None:
    rows = [(7, 1), (200, 70), (0, 1), (0, 0), (3, 2), (130, 30), (0, 0)]
    schedule = make_prefill_schedule(_batch(rows), num_tokens=120, config=_SMALL, window=50)
    tiles, offsets = np.asarray(schedule.tiles), np.cumsum([0] + [count for _, count in rows])
    seen = []
    for t in range(int(schedule.num_tiles[0])):
        tile = Tile.read(tiles, t)
        start, _ = rows[tile.row]
        assert tile.first_token % 16 == 0 and tile.first_token + _SMALL.tile_q <= 128
        for lane in range(tile.first_lane, tile.end_lane):
            token = tile.first_token + lane
            seen.append(token)
            assert tile.position + lane == start + token - offsets[tile.row]
        assert tile.end_position == tile.high + 1
        assert tile.first_kv == max(0, tile.low - 49) // 128 and tile.end_kv == tile.high // 128 + 1
    served = [t for r, (_, count) in enumerate(rows) if count > 1 for t in range(offsets[r], offsets[r + 1])]
    assert seen == served


def test_tiles_fit_the_memory_that_they_are_given_or_say_that_they_do_not() -> None:
    shape = PrefillShape(
        num_kv_heads=8, group=4, lanes=128, vectors=16, block_size=16, pool_dtype="bfloat16", dtype="bfloat16"
    )
    sizes = []
    for megabytes in (16, 64, 128):
        config = PrefillConfig.choose(shape, num_tokens=512, max_context=4096, vmem_bytes=megabytes * 2**20)
        config.check(shape)
        sizes.append(config.vmem_bytes(shape))
        assert sizes[-1] <= 0.75 * megabytes * 2**20
    assert sizes == sorted(sizes)
    with pytest.raises(ValueError, match="shard the heads"):
        PrefillConfig.choose(shape, num_tokens=512, max_context=4096, vmem_bytes=2**20)
    with pytest.raises(ValueError, match="multiple of chunk_q"):
        PrefillConfig(tile_q=40, chunk_q=16, tile_kv=128, step_kv=128).check(shape)
    with pytest.raises(ValueError, match="of the block size"):
        PrefillConfig(tile_q=16, chunk_q=16, tile_kv=192, step_kv=192).check(shape)
