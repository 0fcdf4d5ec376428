"""The TPU's decode kernel, interpreted with race detection over memory that starts as NaN, against the oracle."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the interpreter keeps the races it saw
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pool import KV_DTYPES, pool_shape
from pallas_kernels.paged_attention import RaggedBatch, TpuConfig, make_schedule, tpu
from pallas_kernels.paged_attention.cases import TINY_CASES, Arguments, Case, make_arguments
from pallas_kernels.target import Target
from tests.oracles import attention as oracle
from tests.oracles import kv_pool as kv_oracle
from tests.oracles.tolerance import TOLERANCE

CASES = [case for case in TINY_CASES if case.decode_only and case.kv_dtype != "int8"]
BY_NAME = {case.name: case for case in CASES}


def _config(case: Case, arguments: Arguments, items: int = 1) -> TpuConfig:
    """The chosen one with tiles as small as they can be, for each operation costs the interpreter milliseconds."""
    config = TpuConfig.choose(
        num_tokens=case.num_tokens,
        num_rows=case.num_rows,
        max_blocks=case.max_blocks,
        num_heads=case.num_heads,
        dtype=arguments.q.dtype,
        pool=arguments.pool,
        decode_only=case.decode_only,
        target=Target.named("tpu:v5e"),
    )
    tile = max(256 // config.shape.words, case.block_size)
    return dataclasses.replace(config, decode=dataclasses.replace(config.decode, tile_kv=tile, items=items, chunk=128))


def _attend(case: Case, arguments: Arguments, items: int = 1) -> tuple[np.ndarray, jax.Array]:
    a = arguments
    schedule = jax.jit(
        lambda batch: make_schedule(
            batch,
            num_tokens=case.num_tokens,
            block_size=case.block_size,
            config=_config(case, arguments, items),
            window=case.window,
            implementation="mosaic_tpu",
        )
    )(a.batch)
    out, pool = tpu.paged_attention(
        a.q,
        a.k,
        a.v,
        a.pool,
        schedule,
        scale=case.softmax_scale,
        soft_cap=case.soft_cap,
        sinks=a.sinks,
        interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
    )
    out, values = np.asarray(out).astype(np.float64), np.asarray(pool.values).astype(np.float32)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    return out, values


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_decode_case_equals_the_float64_oracle_and_leaves_its_tokens_in_the_pool(case: Case) -> None:
    arguments, logical = make_arguments(case, implementation="mosaic_tpu"), make_arguments(case)
    a, batch = logical, logical.batch
    expected = oracle.paged_attention(
        *(np.asarray(x) for x in (a.q, a.k, a.v)),
        *kv_oracle.arrays(a.pool),
        *(np.asarray(x) for x in (batch.block_tables, batch.starts, batch.counts)),
        scale=case.softmax_scale,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if a.sinks is None else np.asarray(a.sinks),
    )
    before = np.asarray(arguments.pool.values).astype(np.float32)
    out, values = _attend(case, arguments)
    np.testing.assert_allclose(out, expected, **TOLERANCE[case.dtype])
    slabs = np.asarray(tpu.slabs(arguments.k, arguments.v, arguments.pool)).astype(np.float32)
    for r, (start, _) in enumerate(case.rows):
        before[batch.block_tables[r, start // case.block_size], start % case.block_size] = slabs[r]
    np.testing.assert_array_equal(values, before)


def test_a_row_has_the_same_bits_with_other_rows_beside_it_and_in_steps_of_more_items() -> None:
    case = BY_NAME["decode_gqa"]
    arguments = make_arguments(case, implementation="mosaic_tpu")
    together, _ = _attend(case, arguments, items=2)
    r = 1
    assert case.rows[r][0] >= 128, "the row has more than one tile"
    a, alone = arguments, dataclasses.replace(case, rows=(case.rows[r],), num_tokens=1, num_rows=1)
    batch = RaggedBatch(
        block_tables=a.batch.block_tables[r : r + 1],
        starts=a.batch.starts[r : r + 1],
        counts=a.batch.counts[r : r + 1],
        query_offsets=jnp.zeros(1, jnp.int32),
    )
    one = dataclasses.replace(a, q=a.q[r : r + 1], k=a.k[r : r + 1], v=a.v[r : r + 1], batch=batch)
    np.testing.assert_array_equal(_attend(alone, one)[0][0], together[r])


def test_tables_that_scalar_memory_cannot_hold_are_refused_with_what_to_lower() -> None:
    pool = pool_shape(
        num_blocks=2,
        block_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=KV_DTYPES["bfloat16"],
        implementation="mosaic_tpu",
    )

    def choose(max_blocks: int) -> TpuConfig:
        return TpuConfig.choose(
            num_tokens=256,
            num_rows=256,
            max_blocks=max_blocks,
            num_heads=32,
            dtype=jnp.dtype(jnp.bfloat16),
            pool=pool,
            decode_only=True,
            target=Target.named("tpu:v6e"),
        )

    choose(512)
    with pytest.raises(ValueError, match=r"256 rows of 1024 blocks take \d+ bytes of scalar memory; v6e has 1048576"):
        choose(1024)
