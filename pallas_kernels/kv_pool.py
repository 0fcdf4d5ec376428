"""KVPool: K and V of all blocks of one layer, in the form that an implementation of attention reads.

    form        values           K and V of head k                              who
    logical     [P, C, 2K, H]    vectors 2k and 2k + 1                          "xla"; "mosaic_tpu" with H of 128, 256
    padded      [P, C, 2K, Hp]   the same, zeros in lanes H .. Hp - 1           "mosaic_tpu" with H of 96, 192
    packed      [P, C, K, 2H]    lanes 0 .. H - 1 and H .. 2H - 1 of vector k   "mosaic_tpu" with H of 64

What lies in unowned blocks may be anything, NaN too. int8 values have a float32 scale per token and head for K
and one for V: value = int8 * scale. fp8 has none: values beyond its range become its largest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import static

KV_DTYPES = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "int8": jnp.dtype(jnp.int8),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
}
_TPU_LANES = {64: 128, 96: 128, 128: 128, 192: 256, 256: 256}  # lanes of a vector in the pool, by head dim
_PACKED_HEAD_DIM = 64
_INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPool:
    """One layer's pool, on the device or as shapes; heads are axis 2 of values and axis 1 of scales."""

    values: Any  # [P, C, 2K, Hp], or packed [P, C, K, 2H]
    scales: Any  # [P, 2K, C] float32, K of head k at 2k and V at 2k + 1; None where values are not int8
    head_dim: int = static()  # H

    @property
    def is_packed(self) -> bool:
        """Whether K and V of a head share a vector."""
        return self.values.shape[3] == 2 * self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[2] if self.is_packed else self.values.shape[2] // 2

    @property
    def block_size(self) -> int:
        return self.values.shape[1]


def pool_shape(
    *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype, implementation: str
) -> KVPool:
    """The shapes of a layer's pool in the form that `implementation` reads; num_blocks counts the null block.

    Raises ValueError for a head dim that the implementation does not have.
    """
    vectors, lanes = 2 * num_kv_heads, head_dim
    if implementation == "mosaic_tpu":
        if head_dim not in _TPU_LANES:
            raise ValueError(f"head_dim is {head_dim}; mosaic_tpu has {sorted(_TPU_LANES)}")
        lanes = _TPU_LANES[head_dim]
        vectors = num_kv_heads if head_dim == _PACKED_HEAD_DIM else vectors
    elif implementation != "xla":
        raise ValueError(f"implementation is {implementation!r}; pools have 'xla' and 'mosaic_tpu'")
    values = jax.ShapeDtypeStruct((num_blocks, block_size, vectors, lanes), dtype)
    scales = jax.ShapeDtypeStruct((num_blocks, 2 * num_kv_heads, block_size), jnp.float32)
    return KVPool(values=values, scales=scales if values.dtype == jnp.int8 else None, head_dim=head_dim)


def check_pool(pool: KVPool, num_kv_heads: int, implementation: str) -> None:
    """Raises ValueError where a pool has another form than `implementation` reads for num_kv_heads heads."""
    P, C = pool.values.shape[:2]
    expected = pool_shape(
        num_blocks=P,
        block_size=C,
        num_kv_heads=num_kv_heads,
        head_dim=pool.head_dim,
        dtype=pool.values.dtype,
        implementation=implementation,
    )
    for name, array, form in (("values", pool.values, expected.values), ("scales", pool.scales, expected.scales)):
        shape, wanted = (None if a is None else a.shape for a in (array, form))
        if shape != wanted:
            raise ValueError(
                f"pool.{name} has shape {shape}; for {num_kv_heads} KV heads, head_dim {pool.head_dim}, "
                f"{pool.values.dtype.name} and {implementation!r} it must be {wanted}"
            )


def encode(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Vectors [..., H] as a pool of `dtype` keeps them, and their scales [...] where it is int8.

    int8: symmetric, scale = max |x| / 127, so that the largest element is exact up to rounding; a zero vector has
    scale 0. Other dtypes: the nearest value, the largest finite one where x lies beyond.
    """
    if dtype == jnp.int8:
        x = x.astype(jnp.float32)
        scales = jnp.max(jnp.abs(x), axis=-1) * (1 / _INT8_MAX)
        units = x / jnp.where(scales == 0, 1.0, scales)[..., None]
        return jnp.clip(jnp.round(units), -_INT8_MAX, _INT8_MAX).astype(dtype), scales
    if jnp.finfo(dtype).bits == 8:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype), None
