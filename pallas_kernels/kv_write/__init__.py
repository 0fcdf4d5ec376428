"""Writing a step's K and V into the blocks of a pool."""

import jax

from pallas_kernels.kv_pool import KVPool, check_pool
from pallas_kernels.kv_write import xla
from pallas_kernels.kv_write.runs import find_runs
from pallas_kernels.shapes import check_shapes


def kv_write(
    pool: KVPool,
    k: jax.Array,
    v: jax.Array,
    block_ids: jax.Array,
    offsets: jax.Array,
    *,
    implementation: str = "xla",
) -> KVPool:
    """The pool with token t's K and V at [block_ids[t], offsets[t]]; in place where the pool is donated.

    k: [T, K, H], v: [T, K, V], kept as `kv_pool.encode` says. block_ids, offsets: [T] int32, inside the pool; padding
    tokens name block 0. Where tokens name one place, as padding does, one of them is kept. Raises ValueError for shapes
    that do not fit and for an unknown implementation.
    """
    sizes = check_shapes(
        ("T K H", k), ("T K V", v), ("T", block_ids), ("T", offsets), H=pool.head_dim, V=pool.v_head_dim
    )
    check_pool(pool, sizes["K"], implementation)
    if implementation in ("xla", "mosaic_gpu"):  # a scatter in place is all that a GPU needs
        return xla.kv_write(pool, k, v, block_ids, offsets)
    if implementation == "mosaic_tpu":
        from pallas_kernels.kv_write import mosaic_tpu  # Pallas, which no other platform should wait for

        return mosaic_tpu.kv_write(pool, k, v, find_runs(block_ids, offsets))
    raise ValueError(f"implementation is {implementation!r}; kv_write has 'xla', 'mosaic_tpu' and 'mosaic_gpu'")
