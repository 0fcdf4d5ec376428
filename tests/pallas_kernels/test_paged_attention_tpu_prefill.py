"""The query tiles of the TPU prefill kernel and the memory they take."""

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention import RaggedBatch
from pallas_kernels.paged_attention.tpu.prefill.config import PrefillConfig, PrefillShape
from pallas_kernels.paged_attention.tpu.prefill.schedule import Tile, make_prefill_schedule
from pallas_kernels.ragged_batch import StepShape
from tests.fast_compile import FAST_COMPILE

_SMALL = PrefillConfig(tile_q=16, chunk_q=16, part_q=16, tile_kv=128, step_kv=128)


def _batch(rows: list[tuple[int, int]]) -> RaggedBatch:
    starts, counts = np.array(rows, np.int32).T
    tables, offsets = np.zeros((len(rows), 32), np.int32), np.cumsum(counts, dtype=np.int32) - counts
    return RaggedBatch(block_tables=tables, starts=starts, counts=counts, query_offsets=offsets)


def test_tiles_cover_each_query_once_and_see_no_more_than_they_may() -> None:
    rows = [(7, 1), (200, 70), (0, 1), (0, 0), (3, 2), (130, 30), (0, 0)]
    step = StepShape(num_tokens=120, block_size=16, window=50)
    schedule = jax.jit(lambda b: make_prefill_schedule(b, step, _SMALL), compiler_options=FAST_COMPILE)(_batch(rows))
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
    assert seen == list(range(offsets[-1]))


def test_tiles_fit_the_memory_that_they_are_given_or_say_that_they_do_not() -> None:
    of_pool = {"lanes": 128, "key_lanes": 128, "value_lanes": 128, "vectors": 16, "block_size": 16}
    shape = PrefillShape(num_kv_heads=8, group=4, **of_pool, pool_dtype="bfloat16", dtype="bfloat16")
    sizes = []
    for megabytes in (16, 64, 128):
        config = PrefillConfig.choose(
            shape, num_tokens=512, max_context=4096, vmem_bytes=megabytes * 2**20, mxu_columns=128
        )
        config.check(shape)
        sizes.append(config.vmem_bytes(shape))
        assert sizes[-1] <= 0.75 * megabytes * 2**20
    assert sizes == sorted(sizes)
    with pytest.raises(ValueError, match="shard the heads"):
        PrefillConfig.choose(shape, num_tokens=512, max_context=4096, vmem_bytes=2**20, mxu_columns=128)
    with pytest.raises(ValueError, match="multiple of chunk_q"):
        PrefillConfig(tile_q=40, chunk_q=16, part_q=16, tile_kv=128, step_kv=128).check(shape)
    with pytest.raises(ValueError, match="of the block size"):
        PrefillConfig(tile_q=16, chunk_q=16, part_q=16, tile_kv=192, step_kv=192).check(shape)
