"""Which experts that are not codes the TPU's kernel multiplies, and in which tiles: a pure function of shapes."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.target import Target

DENSE = "dense"  # the class of such experts
_LANES = 128
_MAX_BYTES = 2**22  # of weights in one transfer; two are in VMEM at once


def tile_of(num_outputs: int, num_inputs: int) -> int | None:
    """Outputs whose weights are one transfer: the most that divide them all; None where 128 are no tile of them."""
    tiles = (
        num_outputs // n
        for n in range(1, num_outputs // _LANES + 1)
        if num_outputs % n == 0 and num_outputs // n % _LANES == 0
    )
    return next((tile for tile in tiles if 2 * tile * num_inputs <= _MAX_BYTES), None)


def dense_refusals(weights: Any, dtype: Any, target: Target) -> list[str]:
    """Why the kernel does not multiply such weights [E, O, I] of a device, [] where it does."""
    if not target.runs_tpu_kernels:
        return [f"{target.generation!r} runs no kernel of experts that are not codes"]
    (_, O, I), found = weights.shape, []
    if weights.dtype != jnp.bfloat16 or dtype != jnp.bfloat16:
        found.append(f"weights of {jnp.dtype(weights.dtype).name} and inputs of {jnp.dtype(dtype).name}, not bfloat16")
    if I % _LANES:
        found.append(f"{I} inputs of a device are no multiple of {_LANES}")
    if O % _LANES or tile_of(O, I) is None:
        found.append(f"{O} outputs by {I} inputs of a device have no tile of a multiple of {_LANES}")
    return found
