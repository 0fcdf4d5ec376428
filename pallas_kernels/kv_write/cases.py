"""Named cases of kv_write: tests, tuning and benchmarks run the same ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KV_DTYPES, KVPool, pool_shape
from pallas_kernels.kv_write.oracle import encode
from pallas_kernels.on_device import on_device

_BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "tiny": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """num_real of num_tokens tokens have a place of their own; the rest is padding that names block 0.

    run: tokens that follow each other in the pool, as in chunks of prompts; they begin anywhere in a block and go on
    in the next. None: each token lies anywhere, as those of decoding rows. tiny: as in paged_attention's cases.
    """

    name: str
    num_tokens: int
    num_real: int
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    num_blocks: int = 12
    run: int | None = None
    dtype: str = "float32"
    kv_dtype: str = "float32"
    tiny: bool = True


TINY_CASES = (
    Case(name="decode", num_tokens=4, num_real=3),
    Case(name="single", num_tokens=1, num_real=1),
    Case(name="prefill", num_tokens=96, num_real=90, run=45),
    Case(name="one_head_h256", num_tokens=16, num_real=16, num_kv_heads=1, head_dim=256),
    Case(name="h64", num_tokens=32, num_real=30, head_dim=64, run=15),
    Case(name="h96", num_tokens=16, num_real=9, head_dim=96),
    Case(name="h80_int8", num_tokens=32, num_real=30, head_dim=80, kv_dtype="int8", run=15),
    Case(name="h112", num_tokens=16, num_real=9, head_dim=112, dtype="bfloat16", kv_dtype="bfloat16"),
    Case(name="h160", num_tokens=32, num_real=30, head_dim=160, run=15),
    Case(name="h240_fp8", num_tokens=16, num_real=9, head_dim=240, kv_dtype="fp8_e4m3"),
    Case(name="h192_big_blocks", num_tokens=64, num_real=60, head_dim=192, block_size=64, num_blocks=4, run=60),
    Case(name="no_token", num_tokens=8, num_real=0),
    Case(name="bfloat16", num_tokens=16, num_real=9, dtype="bfloat16", kv_dtype="bfloat16"),
    Case(name="cast", num_tokens=32, num_real=24, run=24, kv_dtype="bfloat16", block_size=32),
    Case(name="int8", num_tokens=32, num_real=25, kv_dtype="int8", run=5),
    Case(name="int8_single", num_tokens=1, num_real=1, kv_dtype="int8"),
    Case(name="fp8_e4m3", num_tokens=16, num_real=9, kv_dtype="fp8_e4m3"),
    Case(name="fp8_e5m2", num_tokens=32, num_real=20, run=20, dtype="bfloat16", kv_dtype="fp8_e5m2"),
)


REAL_CASES = (
    Case(name="llama_8b_prefill", num_tokens=2048, num_real=2048, num_kv_heads=8, num_blocks=2**14, run=512, **_BF16),
    Case(name="llama_8b_decode", num_tokens=64, num_real=64, num_kv_heads=8, num_blocks=2**14, **_BF16),
    Case(
        name="qwen3_30b_tp4_prefill", num_tokens=512, num_real=512, num_kv_heads=1, num_blocks=2**17, run=512, **_BF16
    ),
)


CASES = TINY_CASES + REAL_CASES


def make_arguments(
    case: Case, seed: int = 0, implementation: str = "xla"
) -> tuple[KVPool, jax.Array, jax.Array, jax.Array, jax.Array]:
    """pool, k, v, block_ids, offsets: random, every real token in another place."""
    rng = np.random.default_rng(seed)
    K, H, C = case.num_kv_heads, case.head_dim, case.block_size
    places = np.zeros(case.num_tokens, np.int64)
    free = np.arange(C, case.num_blocks * C)
    if case.run is None:
        places[: case.num_real] = rng.permutation(free)[: case.num_real]
    else:
        runs = free[: len(free) // case.run * case.run].reshape(-1, case.run)
        places[: case.num_real] = rng.permutation(runs).ravel()[: case.num_real]
    context = rng.standard_normal((case.num_blocks, C, 2 * K, H)).astype(np.float32) * 8
    pool = make_pool(context, KV_DTYPES[case.kv_dtype], implementation)
    k, v = (on_device(x, case.dtype) for x in rng.standard_normal((2, case.num_tokens, K, H)))
    return pool, k, v, on_device(places // C, np.int32), on_device(places % C, np.int32)


def make_shapes(case: Case, implementation: str = "mosaic_tpu") -> tuple[Any, ...]:
    """`make_arguments` as ShapeDtypeStructs."""
    pool = pool_shape(
        num_blocks=case.num_blocks,
        block_size=case.block_size,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=KV_DTYPES[case.kv_dtype],
        implementation=implementation,
    )
    heads = jax.ShapeDtypeStruct((case.num_tokens, case.num_kv_heads, case.head_dim), case.dtype)
    ints = jax.ShapeDtypeStruct((case.num_tokens,), jnp.int32)
    return pool, heads, heads, ints, ints


def make_pool(context: np.ndarray, dtype: jnp.dtype, implementation: str, v_head_dim: int | None = None) -> KVPool:
    """The pool that holds context, [P, C, 2K, H] float32, in the form that the implementation reads.

    Lanes that only pad a vector are zero, or NaN like it. v_head_dim: of V, whose first lanes are kept; None is all.
    """
    P, C, pairs, H = context.shape
    shape = pool_shape(
        num_blocks=P,
        block_size=C,
        num_kv_heads=pairs // 2,
        head_dim=H,
        v_head_dim=v_head_dim,
        dtype=dtype,
        implementation=implementation,
    )
    lanes = 0 if shape.is_packed else shape.values.shape[3] - H
    lacks = np.isnan(context[..., :1])
    padding = np.broadcast_to(np.where(lacks, np.float32(np.nan), np.float32(0)), (*context.shape[:3], lanes))
    if dtype == np.int8:  # it has no NaN: scales do
        context, padding = np.where(lacks, 0, context), np.zeros_like(padding)
    values, scales = encode(np.concatenate([context, padding], axis=-1), dtype)
    if shape.is_packed:
        k, v = values[:, :, 0::2], values[:, :, 1::2, : shape.v_head_dim]
        gap, rest = shape.first_value - H, shape.values.shape[3] - shape.first_value - shape.v_head_dim
        values = np.concatenate([k, *[k[..., :1] * 0] * gap, v, *[v[..., :1] * 0] * rest], axis=-1)
    values = values.reshape(shape.values.shape).view(shape.values.dtype)
    if scales is not None:
        scales = on_device(np.where(lacks[..., 0], np.nan, scales).transpose(0, 2, 1), np.float32)
    return dataclasses.replace(shape, values=jax.device_put(values), scales=scales)
