"""The TPU's kernels as a step calls them, interpreted with race detection over memory of NaN, against the oracles."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, encode, pack, pool_shape
from pallas_kernels.logits import Logits
from pallas_kernels.paged_attention import TpuConfig, TpuSchedule, make_schedule, oracle
from pallas_kernels.paged_attention import cases as paged
from pallas_kernels.paged_attention.run_case import choose_config, smallest_tiles
from pallas_kernels.paged_attention.tpu import mosaic_tpu as tpu
from pallas_kernels.paged_attention.tpu.prefill.config import PrefillConfig
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.pallas_kernels.alone import alone_of
from tests.pallas_kernels.tpu_interpreter import INTERPRET, without_races

BY_NAME = {case.name: case for case in paged.TINY_CASES}
_TWO_PARTS_TWO_STEPS = PrefillConfig(tile_q=32, chunk_q=32, part_q=16, tile_kv=256, step_kv=128, stretch=2)
_TWO_CHUNKS = PrefillConfig(tile_q=32, chunk_q=16, part_q=16, tile_kv=128, step_kv=128, stretch=2, sums_by_product=True)
_DIAGONAL = PrefillConfig(tile_q=256, chunk_q=128, part_q=64, tile_kv=256, step_kv=256, stretch=4, sums_by_product=True)
_PREFILL = {
    "mixed_mqa_f32": _TWO_PARTS_TWO_STEPS,
    "mixed_h96_window_sinks": _TWO_CHUNKS,
    "mixed_h256_scale": _TWO_CHUNKS,
    "mixed_big_blocks": PrefillConfig(tile_q=16, chunk_q=16, part_q=16, tile_kv=256, step_kv=256),
    "prefill_long": PrefillConfig(tile_q=64, chunk_q=32, part_q=16, tile_kv=128, step_kv=128, stretch=3),
    "encoder": _TWO_PARTS_TWO_STEPS,
    "spans_f32": _TWO_CHUNKS,
    "spans_window_mqa_f32": _TWO_PARTS_TWO_STEPS,
    "diagonal": _DIAGONAL,
    "diagonal_spans": _DIAGONAL,
    "window": PrefillConfig(tile_q=64, chunk_q=32, part_q=16, tile_kv=256, step_kv=128, stretch=2),
}
_F32: Any = {"dtype": "float32", "kv_dtype": "float32"}


# The interpreter takes seconds for each: those that show a break of the kernels first; the others are slow tests.
_FAST = ("decode_gqa", "decode_h96_window_sinks", "decode_int8", "mixed_gqa", "decode_wide_40k")


def _by_cost(cases: Sequence[paged.Case]) -> list[Any]:
    return [c if c.name in _FAST else pytest.param(c, marks=pytest.mark.slow) for c in cases]


def _config(case: paged.Case, arguments: paged.Arguments, items: int = 1) -> TpuConfig:
    """The chosen one with tiles as small as they can be, for each operation costs the interpreter milliseconds."""
    config = smallest_tiles(choose_config(case, "mosaic_tpu", Target.named("tpu:v5e"), arguments.pool), case.block_size)
    assert isinstance(config, TpuConfig)
    prefill = None if config.prefill is None else _PREFILL.get(case.name, config.prefill)
    return dataclasses.replace(config, decode=dataclasses.replace(config.decode, items=items), prefill=prefill)


def _attend(case: paged.Case, arguments: paged.Arguments, items: int = 1, **decode: Any) -> tuple[np.ndarray, KVPool]:
    """decode: fields of the decode kernel's config in place of those chosen."""
    config = _config(case, arguments, items)
    config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, **decode))

    def step(q, k, v, pool, batch, sinks) -> tuple[jax.Array, KVPool]:
        schedule = make_schedule(batch, **case.step, config=config, implementation="mosaic_tpu")
        assert isinstance(schedule, TpuSchedule)
        logits = Logits(**case.attention, sinks=sinks)
        return tpu.paged_attention(q, k, v, pool, schedule, logits, interpret=INTERPRET)

    a = arguments
    out, pool = without_races(step, a.q, a.k, a.v, a.pool, a.batch, a.sinks)
    assert out.dtype == arguments.q.dtype
    return np.asarray(out).astype(np.float64), pool


def _expected_pool(case: paged.Case, a: paged.Arguments, before: KVPool) -> tuple[np.ndarray, np.ndarray | None]:
    """Values and scales of a pool after the step; the token's place by its row's table."""
    tables = np.asarray(a.batch.block_tables)
    values, scales = np.array(before.values), None if before.scales is None else np.array(before.scales)
    (k, k_units), (v, v_units) = (encode(jnp.asarray(x), before.dtype) for x in (a.k, a.v))  # [T, K, H or V], [T, K]
    joined = pack(k, v, before) if before.is_packed else jnp.stack([k, v], axis=2)
    encoded, lanes = np.asarray(joined).reshape(len(k), values.shape[2], -1), values.shape[3]
    units = None if k_units is None or v_units is None else np.stack([k_units, v_units], axis=2)
    token = 0
    for r, (start, count) in enumerate(case.rows):
        for position in range(start, start + count):
            block, offset = tables[r, position // case.block_size], position % case.block_size
            kept = encoded[token]  # a packed pool has both of a head side by side
            values[block, offset] = np.pad(kept, ((0, 0), (0, lanes - kept.shape[1])))
            if scales is not None:
                scales[block, :, offset] = units[token].reshape(-1)
            token += 1
    return values, scales


@pytest.mark.parametrize(
    "case",
    _by_cost(paged.TINY_CASES + paged.CHUNKED_CASES + paged.WIDE_HEAD_CASES + paged.SPAN_CASES),
    ids=lambda case: case.name,
)
def test_every_tiny_case_equals_the_float64_oracle_and_leaves_its_tokens_in_the_pool(case: paged.Case) -> None:
    _check(case)


@pytest.mark.slow
def test_both_ways_of_widening_int8_give_the_same_bits() -> None:
    """v5e and v5p have one, and the other generations the other."""
    case = next(case for case in paged.TINY_CASES if case.name == "decode_int8")
    one, other = (
        _attend(case, paged.make_arguments(case, implementation="mosaic_tpu"), widens_words=widens)[0]
        for widens in (True, False)
    )
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", _by_cost(paged.WIDE_CASES), ids=lambda case: case.name)
def test_rows_find_their_blocks_where_scalar_memory_does_not_hold_the_tables(case: paged.Case) -> None:
    arguments = paged.make_arguments(case, implementation="mosaic_tpu")
    assert not _config(case, arguments).decode.is_resident
    _check(case)


@pytest.mark.slow
def test_more_steps_than_scalar_memory_has_records_for_match_the_oracle() -> None:
    """140 rows in steps of four: 32 records are there when the launch begins."""
    rows = tuple((7 * i % 128, 1) for i in range(140))
    case = dataclasses.replace(BY_NAME["decode_gqa"], rows=rows, num_tokens=140, num_rows=140)
    arguments = paged.make_arguments(case, implementation="mosaic_tpu")
    found, _ = _attend(case, arguments, items=4, is_resident=False)
    np.testing.assert_allclose(found, oracle.of_case(case, paged.make_arguments(case)), **TOLERANCE[case.dtype])


_LEAVES_OUT = (
    paged.Case(name="diagonal", rows=((256, 256), (0, 200)), num_tokens=512, num_rows=2, window=600, **_F32),
    paged.Case(
        name="diagonal_spans", rows=((256, 256), (0, 200)), spans=((1, 20, 150),), num_tokens=512, num_rows=2, **_F32
    ),
    paged.Case(name="window", rows=((150, 100),), num_tokens=100, num_rows=1, window=40, **_F32),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", _LEAVES_OUT, ids=lambda case: case.name)
def test_keys_that_no_query_of_a_chunk_or_a_part_sees_are_left_out_and_no_others(case: paged.Case) -> None:
    _check(case)


def _check(case: paged.Case) -> None:
    arguments, a = paged.make_arguments(case, implementation="mosaic_tpu"), paged.make_arguments(case)
    expected = oracle.of_case(case, a)
    out, pool = _attend(case, arguments)
    np.testing.assert_allclose(out, expected, **TOLERANCE[case.dtype])
    values, scales = _expected_pool(case, a, arguments.pool)
    assert np.asarray(pool.values).tobytes() == values.tobytes()
    if scales is not None:
        assert np.asarray(pool.scales).tobytes() == scales.tobytes()


@pytest.mark.slow
def test_a_row_has_the_same_bits_with_other_rows_and_more_items_a_step() -> None:
    case = BY_NAME["decode_gqa"]
    arguments = paged.make_arguments(case, implementation="mosaic_tpu")
    together, _ = _attend(case, arguments, items=2)
    r = 1
    assert case.rows[r][0] >= 128, "the row has more than one tile"
    alone, one = alone_of(case, arguments, r)
    np.testing.assert_array_equal(_attend(alone, one)[0][0], together[r])


def test_scalar_memory_bounds_the_tokens_of_a_step_and_not_the_contexts_of_its_rows() -> None:
    pool = pool_shape(
        num_blocks=2,
        block_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=KV_DTYPES["bfloat16"],
        implementation="mosaic_tpu",
    )

    def choose(num_tokens: int, max_blocks: int) -> TpuConfig:
        return TpuConfig.choose(
            num_tokens=num_tokens,
            num_rows=256,
            max_blocks=max_blocks,
            num_heads=32,
            dtype=jnp.dtype(jnp.bfloat16),
            pool=pool,
            decode_only=num_tokens == 256,
            target=Target.named("tpu:v6e"),
        )

    widths = [tokens // 16 for tokens in (2048, 40_960, 131_072)]
    configs = [choose(256, width) for width in widths]
    assert [config.decode.is_resident for config in configs] == [True, False, False]
    taken = [config.scalar_bytes(256, 256, width) for config, width in zip(configs, widths, strict=True)]
    assert taken[1] == taken[2] < 2**14 < taken[0]
    choose(8192, widths[-1])
    with pytest.raises(ValueError, match=r"65536 tokens and 256 rows take \d+ bytes of scalar memory; v6e has 1048576"):
        choose(65_536, 131_072 // 16)


def test_every_real_case_has_tiles_of_whole_blocks_that_fit_on_every_generation() -> None:
    cases = [case for case in paged.REAL_CASES + paged.LONG_CASES if case.rope_dim is None]
    for case, generation in itertools.product(cases, ("v5e", "v5p", "v6e", "v7x")):
        config = choose_config(case, "mosaic_tpu", Target.named(f"tpu:{generation}"), paged.make_shapes(case).pool)
        assert config.decode.tile_kv % case.block_size == 0, (case.name, generation)
