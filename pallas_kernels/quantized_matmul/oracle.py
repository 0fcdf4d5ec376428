"""Quantised products in NumPy float64, from the definition of each kind of code."""

import numpy as np

from pallas_kernels.quantized_matmul.weight import QuantizedWeight

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LIMITS = {"int8": 127.0, "fp8_e4m3": 448.0}


def decode(weight: QuantizedWeight) -> np.ndarray:
    """[.., O, I] float64: what a weight stands for, in the order of its codes."""
    codes, scales = np.asarray(weight.codes), np.asarray(weight.scales)
    if weight.kind in ("int4", "mxfp4"):
        codes = np.stack(np.divmod(codes, 16)[::-1], axis=-1).reshape(*codes.shape[:-1], -1)
    values = np.where(codes < 8, _E2M1[codes % 8], -_E2M1[codes % 8]) if weight.kind == "mxfp4" else codes
    scales = 2.0 ** (scales.astype(np.float64) - 127) if scales.dtype == np.uint8 else scales.astype(np.float64)
    middle = np.full(scales.shape, 8.0 if weight.kind == "int4" else 0.0)
    zeros = middle if weight.zeros is None else np.asarray(weight.zeros).astype(np.float64)
    of_input = np.arange(codes.shape[-1]) * scales.shape[-1] // codes.shape[-1]  # the group of each input
    return (values.astype(np.float64) - zeros[..., of_input]) * scales[..., of_input]


def rounded(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """[T, I] float64: x as the weight's form rounds it. Scales are float32, as they are where they are stored."""
    if weight.activations is None:
        return x.astype(np.float64)
    groups = x.astype(np.float32).reshape(len(x), -1, weight.activation_group or x.shape[1])
    limit = np.float32(_LIMITS[weight.activations])
    scale = np.max(np.abs(groups), axis=-1, keepdims=True) / limit
    scale = np.where(scale == 0, np.float32(1), scale)
    if weight.has_power_scales:
        mantissa, exponent = np.frexp(scale)  # mantissa in [0.5, 1)
        scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(np.float32)
    if weight.input_scale is not None:
        scale = np.full_like(scale, np.asarray(weight.input_scale)[0])
    share = groups / scale
    if weight.activations == "int8":
        codes = np.clip(np.round(share), -128, 127)
    else:
        codes = np.clip(share, -limit, limit).astype(_e4m3())
    return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


def quantized_matmul(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """[T, O] float64."""
    x = x if weight.order is None else x[:, np.asarray(weight.order)]
    return rounded(x, weight) @ decode(weight).T


def _e4m3() -> np.dtype:
    import jax.numpy as jnp

    return np.dtype(jnp.float8_e4m3fn)
