"""Pools on the CPU whose memory is not touched before a block is written: pages that the kernel gives as zeros.

XLA fills what it makes, which takes every page of it; a buffer that NumPy owns would be copied when it is donated. So
XLA allocates, and a callback gives the fresh pages back to the kernel instead of writing zeros: the buffers are XLA's
own, donated and aliased as any others.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback


def full(shapes: Any, values: Any) -> Any:
    """A tree of arrays on the CPU, each full of the scalar of `values` at its place; zeros touch no memory."""
    make: Callable[..., Any] = buffer_callback(_fill, shapes)
    return make(values)


def _fill(context: Any, buffers: Any, values: Any) -> None:
    del context
    for buffer, value in zip(jax.tree.leaves(buffers), jax.tree.leaves(values), strict=True):
        array, scalar = np.asarray(buffer), np.asarray(value)
        if any(scalar.tobytes()) or not _give_back(array):
            array[...] = scalar


def _give_back(array: np.ndarray) -> bool:
    """Makes zeros of an array whose memory this process has for itself; False, with nothing promised, if it cannot."""
    if sys.platform != "linux":  # elsewhere the call is a hint, after which the old content may still be there
        return False
    start, end, page = array.ctypes.data, array.ctypes.data + array.nbytes, mmap.PAGESIZE
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return False
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED):
        return False
    flat = array.reshape(-1).view(np.uint8)  # the pages at both ends may belong to others too
    flat[: first - start] = 0
    flat[last - start :] = 0
    return True
