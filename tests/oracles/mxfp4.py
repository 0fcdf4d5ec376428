"""MXFP4 in NumPy float64, one element at a time, from the fields of its bits. Source: OCP MX Specification v1.0."""

import numpy as np


def e2m1(bits: int) -> float:
    """Four bits: sign, exponent with bias 1, fraction; exponent 0 is subnormal."""
    sign, exponent, fraction = bits >> 3, bits >> 1 & 3, bits & 1
    size = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if sign else size


def e8m0(bits: int) -> float:
    """Eight bits of exponent with bias 127; all ones is no number."""
    return float("nan") if bits == 255 else 2.0 ** (bits - 127)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[.., G, 16] bytes, [.., G] bytes -> [.., G * 32]; element 2 i of a block is the low half of byte i."""
    found = np.zeros((*scales.shape, 32))
    for place in np.ndindex(*scales.shape):
        for i, byte in enumerate(blocks[place].tolist()):
            scale = e8m0(int(scales[place]))
            found[(*place, 2 * i)] = e2m1(byte & 15) * scale
            found[(*place, 2 * i + 1)] = e2m1(byte >> 4) * scale
    return found.reshape(*scales.shape[:-1], -1)
