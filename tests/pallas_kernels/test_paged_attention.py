"""Paged attention against its float64 oracle, over pools poisoned with NaN; its memory; its invariance."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionConfig, RaggedBatch, make_schedule, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Arguments, Case, make_arguments
from tests.oracles import attention as oracle
from tests.oracles.tolerance import TOLERANCE

BY_NAME = {case.name: case for case in CASES}


@functools.partial(jax.jit, static_argnames=("case",))
def _attend(q, pool, batch, sinks, *, case: Case):
    config = AttentionConfig.choose(
        num_tokens=case.num_tokens, block_size=case.block_size, decode_only=case.decode_only, invariant=case.invariant
    )
    schedule = make_schedule(
        batch, num_tokens=case.num_tokens, block_size=case.block_size, config=config, window=case.window
    )
    return paged_attention(
        q,
        pool,
        schedule,
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=sinks,
        implementation="xla",
    )


def _run(case: Case, arguments: Arguments) -> np.ndarray:
    return np.asarray(_attend(arguments.q, arguments.pool, arguments.batch, arguments.sinks, case=case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_equals_the_float64_oracle_and_never_reads_what_is_not_the_rows_own(case: Case) -> None:
    arguments = make_arguments(case)
    batch = arguments.batch
    expected = oracle.paged_attention(
        np.asarray(arguments.q),
        np.asarray(arguments.pool),
        *(np.asarray(a) for a in (batch.block_tables, batch.starts, batch.counts)),
        scale=case.head_dim**-0.5,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=None if arguments.sinks is None else np.asarray(arguments.sinks),
    )
    got = _run(case, arguments)
    assert got.dtype == arguments.q.dtype
    np.testing.assert_allclose(got.astype(np.float64), expected, **TOLERANCE[case.dtype])


def test_queries_of_padding_tokens_do_not_reach_other_tokens() -> None:
    case = BY_NAME["mixed_invariant"]
    arguments = make_arguments(case)
    real = sum(count for _, count in case.rows)
    poisoned = dataclasses.replace(arguments, q=arguments.q.at[real:].set(jnp.nan))
    np.testing.assert_array_equal(_run(case, poisoned), _run(case, arguments))


def test_a_step_without_rows_gives_zeros() -> None:
    case = BY_NAME["mixed_mha"]
    arguments = make_arguments(case)
    empty = dataclasses.replace(arguments.batch, counts=jnp.zeros_like(arguments.batch.counts))
    assert not _run(case, dataclasses.replace(arguments, batch=empty)).any()


def _shapes(rows: int, tokens: int, context: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of Qwen3-0.6B's heads in float32: q, pool, block tables, three vectors of rows."""
    C, width = 16, context // 16
    ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return (
        jax.ShapeDtypeStruct((tokens, 16, 128), jnp.float32),
        jax.ShapeDtypeStruct((rows * width + 1, C, 16, 128), jnp.float32),
        jax.ShapeDtypeStruct((rows, width), jnp.int32),
        ints,
        ints,
        ints,
    )


@functools.cache
def _compile(rows: int, tokens: int, context: int, *, invariant: bool = False) -> jax.stages.Compiled:
    config = AttentionConfig.choose(
        num_tokens=tokens, block_size=16, decode_only=rows == tokens and not invariant, invariant=invariant
    )

    def layer(q, pool, tables, starts, counts, offsets):
        batch = RaggedBatch(block_tables=tables, starts=starts, counts=counts, query_offsets=offsets)
        schedule = make_schedule(batch, num_tokens=tokens, block_size=16, config=config)
        return paged_attention(q, pool, schedule, scale=128**-0.5)

    return jax.jit(layer).lower(*_shapes(rows, tokens, context)).compile()


@pytest.mark.parametrize("invariant", [False, True])
def test_a_chunk_of_2048_at_8k_context_allocates_at_most_64_mb(invariant: bool) -> None:
    memory = _compile(64, 2048, 8192, invariant=invariant).memory_analysis()
    assert 0 < memory.temp_size_in_bytes <= 64 * 2**20


def test_scratch_does_not_grow_with_the_table() -> None:
    small, large = (_compile(16, 16, context).memory_analysis().temp_size_in_bytes for context in (256, 8192))
    assert large - small <= 2**20


@pytest.mark.parametrize(("rows", "tokens"), [(16, 16), (64, 2048)])
def test_no_operation_copies_the_pool(rows: int, tokens: int) -> None:
    blocks = rows * 8192 // 16 + 1
    lines = _compile(rows, tokens, 8192).as_text().splitlines()
    produced = [line for line in lines if f"f32[{blocks}," in line.split(" = ")[-1].split("(")[0]]
    assert any(" parameter(" in line for line in produced)
    moves_nothing = ("parameter", "bitcast", "get-tuple-element", "while", "tuple")
    assert [line for line in produced if not any(f" {op}(" in line for op in moves_nothing)] == []


def test_an_unknown_implementation_and_another_window_are_errors() -> None:
    case = BY_NAME["mixed_mha"]
    arguments = make_arguments(case)
    config = AttentionConfig.choose(num_tokens=126, block_size=16, decode_only=False, invariant=False)
    schedule = jax.eval_shape(
        functools.partial(make_schedule, num_tokens=126, block_size=16, config=config), arguments.batch
    )
    with pytest.raises(ValueError, match="implementation is 'mosaic_tpu'"):
        paged_attention(arguments.q, arguments.pool, schedule, scale=1.0, implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="window is 8"):
        paged_attention(arguments.q, arguments.pool, schedule, scale=1.0, window=8)
    with pytest.raises(ValueError, match="axis T"):
        paged_attention(arguments.q[:5], arguments.pool, schedule, scale=1.0)


def test_invariant_tiles_refuse_a_small_bucket() -> None:
    with pytest.raises(ValueError, match="num_tokens is 32"):
        AttentionConfig.choose(num_tokens=32, block_size=16, decode_only=False, invariant=True)
