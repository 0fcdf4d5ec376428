"""Blocks out of pools and back: one form outside, whatever form the pools have."""

import dataclasses

import jax
import numpy as np
import pytest

from ferrum_jax.runtime.pools.blocks import gather_blocks, scatter_blocks
from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from tests.rows import rows_beside

P, C, K = 6, 8, 2
FORMS = rows_beside(__file__)["forms"]
gather = jax.jit(gather_blocks, static_argnames="head_copies")
scatter = jax.jit(scatter_blocks, static_argnames="head_copies")


def shape_of(implementation: str, head_dim: int, dtype: str, *, num_kv_heads: int = K) -> KVPool:
    sizes = {"num_blocks": P, "block_size": C, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return pool_shape(**sizes, dtype=KV_DTYPES[dtype], implementation=implementation)


def filled_pool(implementation: str, head_dim: int, dtype: str) -> KVPool:
    return filled(shape_of(implementation, head_dim, dtype))


def filled(shape: KVPool) -> KVPool:
    """Its arrays, of distinct small values, zeros in padding lanes."""
    numbers = np.random.default_rng(0).integers(-7, 8, shape.values.shape)
    if not shape.is_packed:
        numbers[..., shape.head_dim :] = 0
    values = numbers.astype(shape.dtype).view(shape.values.dtype)
    scales = None
    if shape.scales is not None:
        scales = np.arange(np.prod(shape.scales.shape), dtype=np.float32).reshape(shape.scales.shape)
    return dataclasses.replace(shape, values=values, scales=scales)


def zeros(shapes):
    return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(a) for a in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("implementation", "head_dim", "dtype"), FORMS)
def test_blocks_come_out_in_the_logical_form_and_go_back_bit_for_bit(implementation, head_dim, dtype):
    pools = (filled_pool(implementation, head_dim, dtype),) * 2
    blocks = gather(pools, np.array([3, 0, 5]), head_copies=1)
    assert blocks[0].values.shape == (3, C, 2 * K, head_dim) and blocks[0].values.dtype == KV_DTYPES[dtype]
    empty = zeros(pools)
    back = scatter(empty, np.array([3, 0, 5]), blocks, head_copies=1)
    for old, new in zip(leaves(pools), leaves(back), strict=True):
        assert np.array_equal(new[[3, 0, 5]], old[[3, 0, 5]]) and not new[[1, 2, 4]].any()


def test_a_block_is_the_same_from_every_form():
    logical = filled_pool("xla", 64, "bfloat16")
    (blocks,) = gather((logical,), np.arange(P), head_copies=1)
    pools = scatter((zeros(shape_of("mosaic_tpu", 64, "bfloat16")),), np.arange(P), (blocks,), head_copies=1)
    (again,) = gather(pools, np.arange(P), head_copies=1)
    assert np.array_equal(np.asarray(again.values), np.asarray(blocks.values))
    k = np.asarray(blocks.values)[:, :, 0::2]
    assert np.array_equal(np.asarray(pools[0].values)[..., :64], k), "K of head k in the first lanes of vector k"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_block_of_keys_wider_than_values_is_the_same_from_every_form(dtype):
    sizes = {"num_blocks": P, "block_size": C, "num_kv_heads": K, "head_dim": 96, "v_head_dim": 64}
    tight, wide = (
        pool_shape(**sizes, dtype=KV_DTYPES[dtype], implementation=implementation)
        for implementation in ("xla", "mosaic_tpu")
    )
    assert tight.values.shape[3] == 160 and wide.values.shape[3] == 256
    assert tight.padded_bytes == 0 and wide.padded_bytes == wide.values.size * wide.dtype.itemsize * 96 // 256
    (blocks,) = gather((filled(tight),), np.arange(P), head_copies=1)
    (pool,) = scatter((zeros(wide),), np.arange(P), (blocks,), head_copies=1)
    values = np.asarray(pool.values)
    assert np.array_equal(values[..., :96], np.asarray(blocks.values)[..., :96])
    assert np.array_equal(values[..., 128:192], np.asarray(blocks.values)[..., 96:])
    assert not values[..., 96:128].any() and not values[..., 192:].any()
    (again,) = gather((pool,), np.arange(P), head_copies=1)
    for old, new in zip(leaves(blocks), leaves(again), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize(("v_head_dim", "is_latent", "dtype"), [(12, False, "bfloat16"), (4, True, "int8")])
def test_blocks_with_vectors_of_two_sizes_go_back_to_a_mesh_that_repeats_them(v_head_dim, is_latent, dtype):
    sizes = {"num_blocks": P, "block_size": C, "head_dim": 8, "v_head_dim": v_head_dim, "is_latent": is_latent}
    form = sizes | {"dtype": KV_DTYPES[dtype], "implementation": "xla"}
    once, wide = (filled(pool_shape(num_kv_heads=heads, **form)) for heads in (1, 3))
    (blocks,) = gather((once,), np.array([3, 0, 5]), head_copies=1)
    assert blocks.values.shape == (3, C, 1, 8 + v_head_dim)
    (pool,) = scatter((zeros(wide),), np.array([3, 0, 5]), (blocks,), head_copies=3)
    for head in range(3):
        assert np.array_equal(np.asarray(pool.values)[[3, 0, 5], :, head], once.values[[3, 0, 5], :, 0])
    (again,) = gather((pool,), np.array([3, 0, 5]), head_copies=3)
    for old, new in zip(leaves(blocks), leaves(again), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_heads_that_a_mesh_repeats_are_kept_once(dtype):
    once = filled_pool("xla", 16, dtype)
    blocks = gather((once,), np.arange(P), head_copies=1)
    wide = shape_of("xla", 16, dtype, num_kv_heads=3 * K)
    pools = scatter((zeros(wide),), np.arange(P), blocks, head_copies=3)
    heads = np.asarray(pools[0].values).reshape(P, C, K, 3, 2, 16)
    assert (heads == heads[:, :, :, :1]).all()
    again = gather(pools, np.arange(P), head_copies=3)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(again), leaves(blocks), strict=True))
