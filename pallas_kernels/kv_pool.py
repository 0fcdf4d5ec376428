"""KVPool: K and V of all blocks of one layer, in the form that an implementation of attention reads.

    form        values           K and V of head k                              who
    logical     [P, C, 2K, H]    vectors 2k and 2k + 1                          "xla"; "mosaic_tpu": H 128, 256, 512
    padded      [P, C, 2K, Hp]   the same, zeros in lanes H .. Hp - 1           "mosaic_tpu" with H of 80 to 240
    packed      [P, C, K, 2H]    lanes 0 .. H - 1 and H .. 2H - 1 of vector k   "mosaic_tpu" with H of 64
    packed      [P, C, K, H + V] lanes 0 .. H - 1 and H .. H + V - 1            "xla", "mosaic_gpu", V of another size
    packed      [P, C, K, Hp+Vp] K from lane 0 and V from lane Hp on, zeros     "mosaic_tpu", V of another size
    latent      [P, C, 1, H + V] V is lanes 0 .. H - 1, and K all of them       "xla" and both kernels'

A layer with an indexer has its keys beside, [P, C, 1, I] under the same ids, in the pool's dtype, or in bfloat16 where
that has eight bits.

What lies in unowned blocks may be anything, NaN too. int8 values have a float32 scale per token and head for K
and one for V: value = int8 * scale. fp8 has none: values beyond its range become its largest. In the logical form
floats of 8 and 16 bits are kept as unsigned integers with their bits, because XLA:CPU writes a token to an array
of such floats by converting all of it to float32 and back.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged import static
from pallas_kernels.shapes import check_counts

KV_DTYPES = {
    "float32": jnp.dtype(jnp.float32),
    "bfloat16": jnp.dtype(jnp.bfloat16),
    "int8": jnp.dtype(jnp.int8),
    "fp8_e4m3": jnp.dtype(jnp.float8_e4m3fn),
    "fp8_e5m2": jnp.dtype(jnp.float8_e5m2),
}
TPU_LANES = 128  # of a memory tile
# lanes of a vector in the pool, by head dim
_TPU_LANES = {64: 128, 80: 128, 96: 128, 112: 128, 128: 128, 160: 256, 192: 256, 240: 256, 256: 256, 512: 512}
TPU_HEAD_DIMS = tuple(_TPU_LANES)
_PACKED_HEAD_DIM = 64
_INT8_MAX = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPool:
    """One layer's pool, on the device or as shapes; heads are axis 2 of values and axis 1 of scales."""

    values: Any  # [P, C, 2K, Hp], or packed [P, C, K, H + V] or [P, C, K, Hp + Vp]
    scales: Any  # [P, 2K, C] float32, K of head k at 2k and V at 2k + 1; None where values are not int8
    index_keys: Any = None  # [P, C, 1, I], of an indexer; None where there is none
    head_dim: int = static()  # H
    v_head_dim: int = static()  # V, most often H
    is_latent: bool = dataclasses.field(default=False, metadata={"static": True})
    # where values are integers with the bits of floats: the dtype of these
    bits_of: jnp.dtype | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of values: float32, bfloat16, int8 or an fp8."""
        return self.bits_of or self.values.dtype

    @property
    def index_dtype(self) -> jnp.dtype:
        """The dtype of an indexer's keys."""
        return self.dtype if self.dtype.itemsize > 1 else jnp.dtype(jnp.bfloat16)

    @property
    def key_dim(self) -> int:
        """Values of a key, as queries are multiplied with it."""
        return self.head_dim + self.v_head_dim if self.is_latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Values of attention's result."""
        return self.head_dim if self.is_latent else self.v_head_dim

    @property
    def is_packed(self) -> bool:
        """Whether K and V of a head share a vector."""
        return self.head_dim != self.v_head_dim or self.values.shape[3] == self.head_dim + self.v_head_dim

    @property
    def first_value(self) -> int:
        """The lane of a packed vector at which V begins."""
        is_tight = self.values.shape[3] == self.head_dim + self.v_head_dim
        return self.head_dim if is_tight else -(-self.head_dim // TPU_LANES) * TPU_LANES

    @property
    def key_lanes(self) -> int:
        """Lanes of a vector, the first, that a key has where it shares the vector with a wider or narrower V."""
        return self.values.shape[3] if self.head_dim == self.v_head_dim else self.first_value

    @property
    def value_lanes(self) -> int:
        """Likewise the last, that V has."""
        return self.values.shape[3] - (0 if self.head_dim == self.v_head_dim else self.first_value)

    @property
    def padded_bytes(self) -> int:
        """Bytes of the lanes that only pad a vector."""
        lanes = self.values.shape[3]
        used = self.head_dim + (self.v_head_dim if self.is_packed else 0)
        return self.values.size // lanes * (lanes - used) * self.values.dtype.itemsize

    @property
    def num_kv_heads(self) -> int:
        return self.values.shape[2] if self.is_packed else self.values.shape[2] // 2

    @property
    def block_size(self) -> int:
        return self.values.shape[1]


def pool_shape(
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    is_latent: bool = False,
    dtype: jnp.dtype,
    implementation: str,
) -> KVPool:
    """The shapes of a layer's pool in the form that `implementation` reads; num_blocks counts the null block.

    v_head_dim: None is head_dim. is_latent: head_dim is that of the latent, v_head_dim what K has beside it. Raises
    ValueError for sizes that the implementation does not have and for a number
    below 1.
    """
    V = head_dim if v_head_dim is None else v_head_dim
    check_counts(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=V
    )
    vectors, lanes, bits_of = 2 * num_kv_heads, head_dim, None
    kept = dtype = jnp.dtype(dtype)
    if is_latent and implementation in ("mosaic_tpu", "mosaic_gpu"):
        implementation = "xla"  # one form, for steps that mix are computed by XLA
    if head_dim != V or is_latent:
        vectors, lanes = num_kv_heads, head_dim + V
    if implementation == "mosaic_tpu":
        if head_dim not in _TPU_LANES or V not in _TPU_LANES or head_dim < V:
            raise ValueError(
                f"head_dim is {head_dim} and v_head_dim {V}; mosaic_tpu has {TPU_HEAD_DIMS}, for V none that is larger"
            )
        lanes = _TPU_LANES[head_dim] + (0 if head_dim == V else _TPU_LANES[V])
        vectors = num_kv_heads if head_dim == _PACKED_HEAD_DIM else vectors
    elif implementation == "xla":
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            kept, bits_of = jnp.dtype(f"uint{8 * dtype.itemsize}"), dtype
    elif implementation != "mosaic_gpu":
        raise ValueError(f"implementation is {implementation!r}; pools have 'xla', 'mosaic_tpu' and 'mosaic_gpu'")
    values = jax.ShapeDtypeStruct((num_blocks, block_size, vectors, lanes), kept)
    scales = jax.ShapeDtypeStruct((num_blocks, 2 * num_kv_heads, block_size), jnp.float32)
    scales = scales if dtype == jnp.int8 else None
    return KVPool(values=values, scales=scales, head_dim=head_dim, v_head_dim=V, is_latent=is_latent, bits_of=bits_of)


def vectors_at(pool: KVPool, blocks: jax.Array, offset: int) -> tuple[jax.Array, jax.Array]:  # [T, K, H], [T, K, V]
    """K and V of one token of each of these blocks [T] int32, as the pool keeps them; of pools without scales."""
    assert pool.scales is None and not pool.is_latent, "these are kept as they are read"
    kept = from_bits(pool.values[blocks, offset], pool)
    if pool.is_packed:
        return unpack(kept, pool)
    return kept[:, 0::2, : pool.head_dim], kept[:, 1::2, : pool.v_head_dim]


def pack(k: jax.Array, v: jax.Array, pool: KVPool) -> jax.Array:  # [..., H], [..., V] -> [..., lanes]
    """K and V of heads in the vectors of a packed pool; lanes that only pad are zero."""
    before = pool.first_value - k.shape[-1]
    behind = pool.values.shape[3] - pool.first_value - v.shape[-1]
    pad, leading = jnp.pad, [(0, 0)] * (k.ndim - 1)
    parts = [part if not n else pad(part, [*leading, (0, n)]) for part, n in ((k, before), (v, behind))]
    return jnp.concatenate(parts, axis=-1)


def unpack(vectors: Any, pool: KVPool) -> tuple[Any, Any]:  # [..., lanes] -> [..., H], [..., V]
    """K and V of the vectors of a packed pool, NumPy's arrays or jax's."""
    first = pool.first_value
    return vectors[..., : pool.head_dim], vectors[..., first : first + pool.v_head_dim]


def with_index_keys(shape: KVPool, index_dim: int) -> KVPool:
    """The shapes of a layer's pool that has keys of an indexer too, of index_dim values, 0 for none."""
    if not index_dim:
        return shape
    bits = jnp.uint16 if shape.index_dtype.itemsize < 4 else shape.index_dtype
    index_keys = jax.ShapeDtypeStruct((*shape.values.shape[:2], 1, index_dim), bits)
    return dataclasses.replace(shape, index_keys=index_keys)


def make_pool(shape: KVPool, *, fill: float | jax.Array) -> KVPool:
    """A pool of this shape in which everything reads as `fill`; of int8, whose values are 0, scales do."""
    bits = 0 if shape.dtype == jnp.int8 else as_bits(jnp.asarray(fill).astype(shape.dtype), shape)
    values = jnp.full(shape.values.shape, bits, shape.values.dtype)
    scales = None if shape.scales is None else jnp.full(shape.scales.shape, fill, shape.scales.dtype)
    index = shape.index_keys
    index = index and jnp.full(index.shape, index_bits(jnp.asarray(fill), shape), index.dtype)
    return dataclasses.replace(shape, values=values, scales=scales, index_keys=index)


def as_bits(values: jax.Array, pool: KVPool) -> jax.Array:
    """Values as the pool's array holds them."""
    return values if pool.bits_of is None else jax.lax.bitcast_convert_type(values, pool.values.dtype)


def from_bits(values: jax.Array, pool: KVPool) -> jax.Array:
    """The pool's array as values."""
    return values if pool.bits_of is None else jax.lax.bitcast_convert_type(values, pool.bits_of)


def index_bits(keys: jax.Array, pool: KVPool) -> jax.Array:
    """An indexer's keys as the pool's array holds them: integers with the bits of floats below 32."""
    keys = keys.astype(pool.index_dtype)
    return keys if pool.index_dtype.itemsize > 2 else jax.lax.bitcast_convert_type(keys, jnp.uint16)


def index_values(kept: jax.Array, pool: KVPool) -> jax.Array:
    """An indexer's keys as values, of the bits in the pool's array."""
    return kept if kept.dtype == pool.index_dtype else jax.lax.bitcast_convert_type(kept, pool.index_dtype)


def check_pool(pool: KVPool, num_kv_heads: int, implementation: str) -> None:
    """Raises ValueError where a pool has another form than `implementation` reads for num_kv_heads heads."""
    P, C = pool.values.shape[:2]
    expected = pool_shape(
        num_blocks=P,
        block_size=C,
        num_kv_heads=num_kv_heads,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        is_latent=pool.is_latent,
        dtype=pool.dtype,
        implementation=implementation,
    )
    for name, array, form in (("values", pool.values, expected.values), ("scales", pool.scales, expected.scales)):
        is_, must_be = (None if a is None else f"{a.dtype.name}{list(a.shape)}" for a in (array, form))
        if is_ != must_be:
            raise ValueError(
                f"pool.{name} is {is_}; for {num_kv_heads} KV heads, head_dim {pool.head_dim}, {pool.dtype.name} and "
                f"{implementation!r} it must be {must_be}"
            )


def encode(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Vectors [..., H] in the dtype that a pool keeps, and their scales [...] where it is int8.

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


def round_trip(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Vectors [..., H] as they are read from a pool of `dtype` that they were written to, in float32."""
    values, scales = encode(x, dtype)
    values = values.astype(jnp.float32)
    return values if scales is None else values * scales[..., None]
