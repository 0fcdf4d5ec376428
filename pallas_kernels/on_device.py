"""Arrays of cases and tests, converted by NumPy: XLA compiles nothing for them."""

from typing import Any

import jax
import numpy as np


def on_device(array: Any, dtype: Any) -> jax.Array:
    """A NumPy array, or what it is made from, in this dtype on the device."""
    return jax.device_put(np.asarray(array).astype(dtype))
