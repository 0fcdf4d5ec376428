"""Copies of blocks: in the layers of their group alone, one after the other, any number of them.

Fresh pools on the CPU: zeros that take no memory before they are written, in buffers that steps alias.
"""

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ferrum_jax.core.plan import Copy
from ferrum_jax.models.spec import CacheGroup
from ferrum_jax.runtime.inputs import pack_copies
from ferrum_jax.runtime.pools import untouched
from ferrum_jax.runtime.pools.copies import COPY_BLOB_SIZE, MAX_COPIES, make_copy
from ferrum_jax.runtime.pools.pools import Pools
from pallas_kernels.kv_pool import make_pool, pool_shape

GROUPS = (CacheGroup(kind="full", layers=(0, 2)), CacheGroup(kind="window", layers=(1,), window=8))
NUM_BLOCKS = 150


@pytest.fixture(scope="module")
def pools() -> Pools:
    """Three layers of int8, so that there are scales to copy too; every number of an array is another block's."""
    shape = pool_shape(
        num_blocks=NUM_BLOCKS,
        block_size=2,
        num_kv_heads=1,
        head_dim=4,
        dtype=np.dtype(np.int8),
        implementation="xla",
    )
    layers = [jax.tree.map(_numbered, make_pool(shape, fill=0.0)) for _ in range(3)]
    return Pools(kv=tuple(layers), states=((),) * 3, slots=None, prompts=None, masks=None, hidden=None)


def _numbered(array: jax.Array) -> jax.Array:
    ids = np.arange(NUM_BLOCKS).reshape(-1, *[1] * (array.ndim - 1))
    return jax.numpy.asarray(np.broadcast_to(ids, array.shape).astype(array.dtype))


def _run(pools: Pools, copies: list[Copy]) -> list[list[np.ndarray]]:
    """Per layer, which block's content each block has, in values and in scales."""
    kv = pools.flat_caches()
    copy_blocks = jax.jit(make_copy(pools, GROUPS))
    for blob in pack_copies([copies]):
        assert blob.shape == (COPY_BLOB_SIZE,)
        kv = copy_blocks(kv, blob)
    layers, _ = jax.tree.unflatten(jax.tree.structure(pools.caches), kv)
    return [[np.asarray(a).reshape(NUM_BLOCKS, -1) for a in jax.tree.leaves(layer)] for layer in layers]


def _contents(pools: Pools, copies: list[Copy]) -> list[list[int]]:
    """Per layer the block whose content each block has."""
    contents = []
    for arrays in _run(pools, copies):
        assert len(arrays) == 2 and all((array == array[:, :1]).all() for array in arrays), "a block is torn"
        values, scales = (array[:, 0].astype(np.uint8).tolist() for array in arrays)
        assert values == scales
        contents.append(values)
    return contents


def test_a_block_is_copied_in_every_layer_of_its_group_and_in_no_other(pools):
    full, window, last = _contents(pools, [Copy(pool=0, source=5, target=9), Copy(pool=1, source=7, target=3)])
    moved = list(range(NUM_BLOCKS))
    moved[9] = 5
    assert full == last == moved
    moved[9], moved[3] = 9, 7
    assert window == moved


def test_more_copies_than_one_call_takes_go_in_several(pools):
    copies = [Copy(pool=0, source=i, target=i + 75) for i in range(1, MAX_COPIES + 6)]
    full, window, _ = _contents(pools, copies)
    assert full[76 : 76 + len(copies)] == list(range(1, len(copies) + 1))
    assert window == list(range(NUM_BLOCKS))


def test_without_copies_there_is_no_call():
    assert pack_copies([[]]) == []


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
