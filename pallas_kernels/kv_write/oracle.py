"""The logical pool [P, C, 2K, H] in NumPy: what a token's K and V become in it, and what is read back."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_pool import KVPool

_FP8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # the largest finite values


def arrays(pool: KVPool) -> tuple[np.ndarray, np.ndarray | None]:
    """Values in their own dtype, and scales, of a pool in the logical form."""
    values = np.asarray(pool.values).view(pool.dtype)
    return values, None if pool.scales is None else np.asarray(pool.scales)


def encode(x: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray | None]:
    """[..., H] as the pool keeps it, and the scales [...] of int8."""
    if dtype == np.int8:
        x = x.astype(np.float32)
        scales = np.abs(x).max(axis=-1) * np.float32(1 / 127)
        units = np.divide(x, scales[..., None], out=np.zeros_like(x), where=scales[..., None] != 0)
        return np.clip(np.round(units), -127, 127).astype(np.int8), scales
    if dtype.name in _FP8:
        x = np.clip(x.astype(np.float32), -_FP8[dtype.name], _FP8[dtype.name])
    return x.astype(dtype), None


def decode(values: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
    """[P, C, 2K, H] float64 of values and of scales [P, 2K, C]."""
    decoded = values.astype(jnp.bfloat16 if values.dtype.name in _FP8 else values.dtype).astype(np.float64)
    return decoded if scales is None else decoded * scales.astype(np.float64).transpose(0, 2, 1)[..., None]


def write(
    values: np.ndarray,  # [P, C, 2K, H]
    scales: np.ndarray | None,  # [P, 2K, C]
    k: np.ndarray,  # [T, K, H]
    v: np.ndarray,
    places: list[tuple[int, int]],  # block and offset of the first tokens; the rest is padding
) -> tuple[np.ndarray, np.ndarray | None]:
    """Copies of values and scales with each token at its place."""
    values, scales = values.copy(), None if scales is None else scales.copy()
    for t, (block, offset) in enumerate(places):
        for part, x in enumerate((k[t], v[t])):
            values[block, offset, part::2], units = encode(x, values.dtype)
            if scales is not None:
                scales[block, part::2, offset] = units
    return values, scales
