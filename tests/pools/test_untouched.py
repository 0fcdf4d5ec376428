"""Fresh pools on the CPU: zeros that take no memory before they are written, in buffers that steps alias."""

from __future__ import annotations

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ferrum_jax.pools import untouched

SHAPE = (64, 1 << 18)  # 64 MiB of float32


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


@functools.cache
def maker(shape, dtype):
    shapes, value = [jax.ShapeDtypeStruct(shape, dtype)], jax.ShapeDtypeStruct((1,), dtype)
    return jax.jit(lambda value: untouched.full(shapes, [value])[0]).lower(value).compile()


def make(shape, dtype, value=0):
    return maker(shape, jnp.dtype(dtype))(np.full(1, value, dtype))


def test_zeros_take_no_memory_until_they_are_written_and_a_step_writes_them_in_place():
    shape = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    step = jax.jit(lambda pool, row: pool.at[row, 0].set(1.0), donate_argnums=0).lower(shape, 0).compile()
    maker(SHAPE, jnp.dtype(jnp.float32))  # what compiling takes is not counted
    before = resident_bytes()
    pool = make(SHAPE, jnp.float32)
    pool.block_until_ready()
    address = pool.unsafe_buffer_pointer()
    for row in range(4):
        pool = step(pool, row)
    assert pool.unsafe_buffer_pointer() == address
    assert resident_bytes() - before < math.prod(SHAPE) * 4 // 4
    content = np.asarray(pool)
    assert content[:4, 0].tolist() == [1.0] * 4 and content.sum() == 4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int32])
@pytest.mark.parametrize("size", [3, 1000, 5000, 70_001])
def test_memory_that_was_used_before_reads_as_zeros_of_every_size_and_dtype(dtype, size):
    for _ in range(3):
        used = make((size,), dtype, 7)
        assert np.asarray(used).astype(np.float32).tolist() == [7] * size
        del used
        fresh = make((size,), dtype)
        assert not np.asarray(fresh).view(np.uint8).any()


def test_where_the_kernel_takes_no_pages_back_the_zeros_are_written(monkeypatch):
    monkeypatch.setattr(untouched.sys, "platform", "another")
    fresh = make((70_001,), jnp.bfloat16)
    assert np.asarray(fresh).dtype == ml_dtypes.bfloat16 and not np.asarray(fresh).view(np.uint8).any()
