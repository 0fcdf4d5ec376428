"""Paged attention against its float64 oracle, over pools poisoned with NaN; its memory; its invariance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, cases, make_schedule, oracle, paged_attention
from pallas_kernels.paged_attention.run_case import choose_config
from pallas_kernels.target import Target
from pallas_kernels.tolerance import TOLERANCE
from tests.fast_compile import FAST_COMPILE, UNOPTIMISED
from tests.marks import few, slow
from tests.rows import rows_beside

CASES = (
    cases.TINY_CASES
    + cases.INVARIANT_CASES
    + cases.SPAN_CASES
    + cases.CHUNKED_CASES
    + cases.WIDE_HEAD_CASES
    + cases.LATENT_CASES
)
BY_NAME = {case.name: case for case in CASES}
SIDE_BY_SIDE = [
    BY_NAME[name] for name in ("decode_gqa", "mixed_h96_window_sinks", "mixed_int8", "encoder", "invariant")
]
SIDE_BY_SIDE += [*cases.SPAN_CASES[:1], *cases.LATENT_CASES[:1]]


@functools.partial(jax.jit, static_argnames=("case", "together"), compiler_options=FAST_COMPILE)
def _attend(arguments: tuple, *, case: cases.Case, together: int = 1) -> tuple[jax.Array, KVPool]:
    q, k, v, pool, batch, sinks = arguments
    config = choose_config(case, "xla", Target.named("cpu"), pool)
    config = dataclasses.replace(config, together=together, decode_together=together, keeps_dtype=together > 1)
    schedule = make_schedule(batch, **case.step, config=config)
    return paged_attention(q, k, v, pool, schedule, **case.attention, sinks=sinks)


def _run(case: cases.Case, arguments: cases.Arguments, together: int = 1) -> np.ndarray:
    a = arguments
    return np.asarray(_attend((a.q, a.k, a.v, a.pool, a.batch, a.sinks), case=case, together=together)[0])


FAST = rows_beside(__file__)["fast"]


@pytest.mark.parametrize(
    "case", [case if case.name in FAST else slow(case) for case in CASES], ids=lambda case: case.name
)
def test_every_case_equals_the_oracle_and_reads_only_its_own_rows(case: cases.Case) -> None:
    arguments = cases.make_arguments(case)
    expected = oracle.of_case(case, arguments)
    got = _run(case, arguments)
    assert got.dtype == arguments.q.dtype
    np.testing.assert_allclose(got.astype(np.float64), expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"]))
@pytest.mark.parametrize("case", SIDE_BY_SIDE, ids=lambda case: case.name)
def test_tiles_side_by_side_as_on_a_gpu_equal_the_oracle_too(case: cases.Case, dtype: str) -> None:
    kv_dtype = dtype if case.kv_dtype == "float32" else case.kv_dtype
    case = dataclasses.replace(case, dtype=dtype, kv_dtype=kv_dtype)
    arguments = cases.make_arguments(case)
    got = _run(case, arguments, together=3)
    np.testing.assert_allclose(got.astype(np.float64), oracle.of_case(case, arguments), **TOLERANCE[dtype])


def test_a_gpu_computes_few_large_groups_of_tiles() -> None:
    """Each step of a loop costs it a dozen launches."""
    pool = _shapes(64, 64, 4096, "bfloat16")[3]
    sizes = {"block_size": 16, "invariant": False, "gpu_heads": (32, pool)}
    config = AttentionConfig.choose(**sizes, num_tokens=4096, decode_only=False)
    assert config.tile_q * config.together * 32 == 2**16 and config.tile_kv == 512
    assert AttentionConfig.choose(**sizes, num_tokens=64, decode_only=True).decode_together == 64
    one_row = AttentionConfig.choose(**sizes, num_tokens=1, decode_only=True)
    assert one_row.decode_together == 1 and one_row.keeps_dtype


def test_queries_of_padding_tokens_do_not_reach_other_tokens() -> None:
    case = BY_NAME["invariant"]
    arguments = cases.make_arguments(case)
    real = sum(count for _, count in case.rows)
    poisoned = dataclasses.replace(
        arguments, q=np.where(np.arange(case.num_tokens)[:, None, None] < real, arguments.q, np.float32(np.nan))
    )
    np.testing.assert_array_equal(_run(case, poisoned), _run(case, arguments))


def test_a_step_without_rows_gives_zeros() -> None:
    case = BY_NAME["prefill_long"]
    arguments = cases.make_arguments(case)
    empty = dataclasses.replace(arguments.batch, counts=np.zeros_like(arguments.batch.counts))
    assert not _run(case, dataclasses.replace(arguments, batch=empty)).any()


def _shapes(rows: int, tokens: int, context: int, kv_dtype: str) -> tuple:
    """Arguments of Qwen3-0.6B's heads in float32: q, k, v, pool, batch."""
    C, width = 16, context // 16
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    tables = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    pool = pool_shape(
        num_blocks=rows * width + 1,
        block_size=C,
        num_kv_heads=8,
        head_dim=128,
        dtype=KV_DTYPES[kv_dtype],
        implementation="xla",
    )
    heads = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.float32)
    batch = RaggedBatch(block_tables=tables, starts=ints, counts=ints, query_offsets=ints)
    return jax.ShapeDtypeStruct((tokens, 16, 128), jnp.float32), heads, heads, pool, batch


@functools.cache
def _compile(
    rows: int, tokens: int, context: int, *, invariant: bool = False, kv_dtype: str = "float32"
) -> jax.stages.Compiled:
    config = AttentionConfig.choose(
        num_tokens=tokens, block_size=16, decode_only=rows == tokens and not invariant, invariant=invariant
    )

    def layer(q, k, v, pool, batch):
        schedule = make_schedule(batch, num_tokens=tokens, block_size=16, config=config)
        return paged_attention(q, k, v, pool, schedule, scale=128**-0.5)

    return jax.jit(layer, donate_argnums=3).lower(*_shapes(rows, tokens, context, kv_dtype)).compile(UNOPTIMISED)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_chunk_of_2048_at_8k_context_allocates_at_most_64_mb(invariant: bool) -> None:
    memory = _compile(64, 2048, 8192, invariant=invariant).memory_analysis()
    assert 0 < memory.temp_size_in_bytes <= 64 * 2**20


def test_scratch_does_not_grow_with_the_table() -> None:
    small, large = (_compile(16, 16, context).memory_analysis().temp_size_in_bytes for context in (256, 8192))
    assert large - small <= 2**20


@pytest.mark.parametrize(
    ("rows", "tokens", "kv_dtype"),
    [(16, 16, "float32"), (64, 2048, "float32"), (64, 2048, "int8"), (16, 16, "fp8_e4m3")],
)
def test_a_donated_pool_is_never_copied(rows: int, tokens: int, kv_dtype: str) -> None:
    compiled = _compile(rows, tokens, 8192, kv_dtype=kv_dtype)
    memory = compiled.memory_analysis()
    pool = jax.tree.leaves(_shapes(rows, tokens, 8192, kv_dtype)[3])
    assert memory.alias_size_in_bytes == sum(a.size * a.dtype.itemsize for a in pool)
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes // 4
    blocks = rows * 8192 // 16 + 1
    sizes = (f"[{blocks},", f"[{blocks * 16},")
    moving = (" copy(", " convert(", " bitcast-convert(")  # in any of them the whole pool would move
    lines = [x for x in compiled.as_text().splitlines() if any(op in x for op in moving)]
    assert [x for x in lines if any(size in x for size in sizes)] == []


def test_what_does_not_fit_is_an_error_that_names_it() -> None:
    case = BY_NAME["prefill_long"]
    a = cases.make_arguments(case)
    config = AttentionConfig.choose(num_tokens=128, block_size=16, decode_only=False, invariant=False)
    make = functools.partial(make_schedule, num_tokens=128, block_size=16, config=config)
    schedule = jax.eval_shape(make, a.batch)
    with pytest.raises(ValueError, match="implementation is 'mosaic'"):
        paged_attention(a.q, a.k, a.v, a.pool, schedule, scale=1.0, implementation="mosaic")
    with pytest.raises(ValueError, match="implementation is 'mosaic'"):
        make(a.batch, implementation="mosaic")
    with pytest.raises(ValueError, match="window is 8 and causal is False"):
        make(a.batch, window=8, causal=False)
    for window in (0, -3):
        with pytest.raises(ValueError, match=f"window is {window}; it must be 1 or more, or None"):
            make(a.batch, window=window)
    for number in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"soft_cap is {number}; it must be a finite number above 0, or None"):
            paged_attention(a.q, a.k, a.v, a.pool, schedule, scale=1.0, soft_cap=number)
        with pytest.raises(ValueError, match=rf"scale is {number}; it must be a finite number above 0"):
            paged_attention(a.q, a.k, a.v, a.pool, schedule, scale=number)
    with pytest.raises(ValueError, match="block_size is 0; it must be a whole number, 1 or more"):
        make_schedule(a.batch, num_tokens=128, block_size=0, config=config)
    with pytest.raises(ValueError, match="tile_q is 0; it must be a whole number, 1 or more"):
        dataclasses.replace(config, tile_q=0)
    with pytest.raises(ValueError, match="axis T"):
        paged_attention(a.q[:5], a.k[:5], a.v[:5], a.pool, schedule, scale=1.0)
    with pytest.raises(ValueError, match="blocks of 32 tokens; the pool's have 16"):
        other = dataclasses.replace(schedule, step=dataclasses.replace(schedule.step, block_size=32))
        paged_attention(a.q, a.k, a.v, a.pool, other, scale=1.0)


def test_invariant_tiles_refuse_a_small_bucket() -> None:
    with pytest.raises(ValueError, match="num_tokens is 32"):
        AttentionConfig.choose(num_tokens=32, block_size=16, decode_only=False, invariant=True)
