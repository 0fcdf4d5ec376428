"""Named cases of kv_write: tests, tuning and benchmarks run the same ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, as_bits, pool_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """num_real of num_tokens tokens have a place of their own; the rest is padding that names block 0."""

    name: str
    num_tokens: int
    num_real: int
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_blocks: int = 12
    dtype: str = "float32"
    kv_dtype: str = "float32"


CASES = (
    Case(name="decode", num_tokens=4, num_real=3),
    Case(name="single", num_tokens=1, num_real=1),
    Case(name="prefill", num_tokens=96, num_real=90),
    Case(name="one_head_wide", num_tokens=16, num_real=16, num_kv_heads=1, head_dim=256, block_size=8),
    Case(name="big_blocks", num_tokens=64, num_real=1, block_size=64),
    Case(name="cast", num_tokens=16, num_real=9, kv_dtype="bfloat16"),
    Case(name="int8", num_tokens=16, num_real=9, kv_dtype="int8"),
    Case(name="int8_single", num_tokens=1, num_real=1, kv_dtype="int8"),
    Case(name="fp8_e4m3", num_tokens=16, num_real=9, kv_dtype="fp8_e4m3"),
    Case(name="fp8_e5m2", num_tokens=16, num_real=9, dtype="bfloat16", kv_dtype="fp8_e5m2"),
)


def make_arguments(case: Case, seed: int = 0) -> tuple[KVPool, jax.Array, jax.Array, jax.Array, jax.Array]:
    """pool, k, v, block_ids, offsets: random, every real token in another place."""
    rng = np.random.default_rng(seed)
    K, H, C = case.num_kv_heads, case.head_dim, case.block_size
    places = np.zeros(case.num_tokens, np.int64)
    places[: case.num_real] = C + rng.permutation((case.num_blocks - 1) * C)[: case.num_real]
    shape = pool_shape(
        num_blocks=case.num_blocks,
        block_size=C,
        num_kv_heads=K,
        head_dim=H,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation="xla",
    )
    values = as_bits(jnp.asarray(rng.standard_normal(shape.values.shape) * 8, shape.dtype), shape)
    scales = None if shape.scales is None else jnp.asarray(rng.standard_normal(shape.scales.shape), jnp.float32)
    pool = dataclasses.replace(shape, values=values, scales=scales)
    k, v = jnp.asarray(rng.standard_normal((2, case.num_tokens, K, H)), case.dtype)
    return pool, k, v, jnp.asarray(places // C, jnp.int32), jnp.asarray(places % C, jnp.int32)
